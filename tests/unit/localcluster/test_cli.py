from localcluster.cli import parser, passed_on


def test_options_of_kubectl_are_not_ours() -> None:
    own, theirs = passed_on(["kubectl", "-n", "prefill-system", "get", "pods", "--name", "x"])
    assert theirs == ["-n", "prefill-system", "get", "pods", "--name", "x"]
    assert parser().parse_args(own).name == "demo"


def test_the_cluster_is_named_before_the_command() -> None:
    own, theirs = passed_on(["exec", "--name", "e2e", "ip", "-o", "link"])
    assert theirs == ["ip", "-o", "link"]
    assert parser().parse_args(own).name == "e2e"


def test_other_commands_are_parsed_whole() -> None:
    assert passed_on(["up", "--name", "a"]) == (["up", "--name", "a"], [])
