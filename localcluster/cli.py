"""python3 -m localcluster: the commands."""

import argparse
import sys
from pathlib import Path

from localcluster import apiserver, cluster, images, preflight, programs
from localcluster.console import ClusterError, progress

DEFAULT_NAME = "demo"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python3 -m localcluster", description="A real Kubernetes on this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, named: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if named:
            command.add_argument("--name", default=DEFAULT_NAME, help=f"which cluster (default {DEFAULT_NAME})")
        return command

    add("preflight", "check the machine, install missing Debian packages, print the disk space needed")
    add("build", "build the Kubernetes programs that are missing in the cache", named=False)
    add("up", "start a cluster and print its kubeconfig")
    add("down", "stop a cluster and remove all of it")
    add("status", "say whether a cluster runs and where things are")
    npu = add("npu", "give the node pretend NPUs")
    npu.add_argument("count", type=int)
    for name, text in (("kubectl", "run kubectl on a cluster"), ("exec", "run a command inside the node")):
        add(name, text + "; what follows is its own")
    server = add("apiserver", "an API server without a node, for operator tests", named=False)
    server.add_argument("action", choices=("up", "down"))
    image = add("image", "build or load container images", named=False)
    actions = image.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="build a Dockerfile on the local base image (build argument BASE)")
    build.add_argument("tag")
    build.add_argument("context", type=Path)
    build.add_argument("-f", "--file", type=Path, help="default: CONTEXT/Dockerfile")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    engine = actions.add_parser("engine", help="build the thin CPU engine image and print its name")
    engine.add_argument("version")
    engine.add_argument("environment", type=Path, help="virtual environment with vLLM")
    load = actions.add_parser("load", help="import a built image into a cluster")
    load.add_argument("tag")
    load.add_argument("--name", default=DEFAULT_NAME)
    return top


def image(options: argparse.Namespace) -> None:
    if options.action == "build":
        arguments = dict(pair.split("=", 1) for pair in options.build_arg)
        file = options.file or options.context / "Dockerfile"
        print(images.build(options.tag, options.context, file, arguments).tag)
    elif options.action == "engine":
        print(images.engine(options.version, options.environment).tag)
    else:
        settings = cluster.require(options.name)
        archive = images.archive(options.tag)
        with progress.step(f"loading {options.tag} into cluster {options.name}"):
            images.load_archive(settings, cluster.require_node(settings), archive)


def run(options: argparse.Namespace) -> int:
    command, name = options.command, getattr(options, "name", "")
    if command not in ("build", "apiserver"):
        preflight.require_root()
    if command == "preflight":
        preflight.check(name, whole_demo=True)
    elif command == "build":
        programs.build()
    elif command == "up":
        preflight.check(name, whole_demo=False)
        print(cluster.up(name).kubeconfig)
    elif command == "down":
        cluster.down(name)
    elif command == "status":
        return cluster.status(name)
    elif command == "npu":
        cluster.pretend_npus(name, options.count)
    elif command == "kubectl":
        cluster.kubectl(name, options.arguments)
    elif command == "exec":
        cluster.execute(name, options.arguments)
    elif command == "apiserver":
        if options.action == "down":
            apiserver.background_down()
        else:
            print(apiserver.background_up())
    else:
        image(options)
    return 0


def passed_on(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the program that kubectl and exec run: argparse would take its options for ours."""
    if words[:1] not in (["kubectl"], ["exec"]):
        return words, []
    own = 3 if words[1:2] == ["--name"] else 1
    return words[:own], words[own:]


def main() -> int:
    own, arguments = passed_on(sys.argv[1:])
    options = parser().parse_args(own, argparse.Namespace(arguments=arguments))
    try:
        return run(options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next run cleans up by itself", file=sys.stderr)
        return 130
