"""Carries a plan out, in order, stopping at the first write that fails: the next look at the cluster decides anew."""

from __future__ import annotations

import logging

from prefill_operator.reconcile.cluster import CHILDREN, Cluster
from prefill_operator.reconcile.errors import InvalidError
from prefill_operator.reconcile.plan import Action, Apply

log = logging.getLogger(__name__)


async def carry_out(cluster: Cluster, namespace: str, actions: list[Action]) -> None:
    for action in actions:
        if isinstance(action, Apply):
            manifest = action.manifest
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            try:
                await cluster.apply(CHILDREN[kind], manifest, action.uid)
            except InvalidError as error:
                if action.uid is None:
                    raise
                # What a hand has added to a keyed list is not ours to remove.
                remedy = f"if somebody edited it, delete {kind} {name}: it is made anew"
                raise InvalidError(f"{error.message}; {remedy}") from error
            verb = "created" if action.uid is None else "changed"
        else:
            kind, name = action.kind, action.name
            await cluster.delete(CHILDREN[kind], namespace, name, action.uid)
            verb = "deleted"
        log.info("%s/%s: %s %s (%s)", namespace, name, verb, kind, action.why)
