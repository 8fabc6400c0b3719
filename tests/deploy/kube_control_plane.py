"""Emulates an API server with its controllers, as far as the runbook needs: objects, rules, pods.

update_validation.py validates, statefulset_controller.py adds pods, disruption_controller.py grants
evictions. ``apply`` is kubectl's client-side one (three-way, by the last applied configuration;
lists are replaced as a whole). A wait runs the controllers until they settle.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from disruption_controller import GuardedPod, evict
from manifests import COMPONENT, Object, kubectl
from statefulset_controller import Pod, StatefulSetController
from update_validation import creation_errors, update_errors

Key = tuple[str, str, str]  # namespace, kind, name
SETTINGS = "settings"


def key_of(one: Object) -> Key:
    metadata = one["metadata"]
    return metadata.get("namespace", ""), one["kind"], metadata["name"]


@dataclass
class ControlPlane:
    """``unknown`` are API groups whose CRDs are not installed."""

    unknown: set[str] = field(default_factory=set)
    objects: dict[Key, Object] = field(default_factory=dict)
    applied: dict[Key, Object] = field(default_factory=dict)
    sets: dict[Key, StatefulSetController] = field(default_factory=dict)
    room: int | None = None  # workers that fit

    # kubectl -------------------------------------------------------------------------

    def apply(self, objects: Iterable[Object]) -> list[str]:
        """``kubectl apply``: an error of one object does not stop the others."""
        return [error for one in objects for error in self._apply(one)]

    def _apply(self, wanted: Object) -> list[str]:
        group = wanted["apiVersion"].partition("/")[0]
        key, name = key_of(wanted), wanted["metadata"]["name"]
        if group in self.unknown:
            return [
                f'resource mapping not found for name: "{name}" namespace: "{key[0]}" '
                f'no matches for kind "{wanted["kind"]}" in version "{wanted["apiVersion"]}"\n'
                "ensure CRDs are installed first"
            ]
        live = self.objects.get(key)
        new = copy.deepcopy(wanted)
        if live is not None:
            new = _three_way(self.applied.get(key, {}), wanted, live)
        errors = self._store(key, new)
        if not errors:
            self.applied[key] = copy.deepcopy(wanted)
        return errors

    def create(self, new: Object) -> None:
        key = key_of(new)
        assert key not in self.objects, f"AlreadyExists: {key}"
        assert not self._store(key, copy.deepcopy(new))

    def _store(self, key: Key, new: Object) -> list[str]:
        live = self.objects.get(key)
        errors = creation_errors(new) if live is None else update_errors(live, new)
        if errors:
            return [f'{key[1]} "{key[2]}" is invalid: {error}' for error in errors]
        self.objects[key] = new
        if key[1] == "StatefulSet":
            if key not in self.sets:
                self.sets[key] = StatefulSetController(new["spec"])
            self.sets[key].spec = new["spec"]
        return []

    def change(self, key: Key, edit: Callable[[Object], None]) -> list[str]:
        """Any PATCH or PUT."""
        new = copy.deepcopy(self.objects[key])
        edit(new)
        return self._store(key, new)

    def patch(self, key: Key, flags: Sequence[str]) -> list[str]:
        """``kubectl patch FLAGS``: the real kubectl computes the patched object."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(self.objects[key], file)
            file.flush()
            command = [kubectl(), "patch", "--local", "-o", "json", "-f", file.name, *flags]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return [done.stderr]
        return self._store(key, json.loads(done.stdout))

    def delete(self, key: Key, *, foreground: bool = False) -> None:
        """Dependants are deleted, too; in the foreground, before this returns."""
        del self.objects[key]
        self.applied.pop(key, None)
        if key in self.sets:
            # The controller ignores a set that is being deleted; the garbage collector ends its
            # pods with SIGTERM, and deletes its revisions.
            assert foreground, "its pods would still run beside those of the next set"
            del self.sets[key]

    def settle(self) -> None:
        for (namespace, _, name), controller in self.sets.items():
            if name == "workers":
                controller.room = self.room
            controller.settle()
            for claim in controller.spec.get("volumeClaimTemplates", []):
                for ordinal in controller.pods:
                    full = f"{claim['metadata']['name']}-{name}-{ordinal}"
                    self.objects.setdefault(
                        (namespace, "PersistentVolumeClaim", full), copy.deepcopy(claim)
                    )

    # The machines ----------------------------------------------------------------------

    def pods(self, namespace: str, labels: Mapping[str, str] | None = None) -> dict[str, Pod]:
        """Pods of StatefulSets, by name."""
        return {
            f"{name}-{ordinal}": pod
            for (where, _, name), controller in self.sets.items()
            for ordinal, pod in controller.pods.items()
            if where == namespace
            and (labels or {}).items() <= pod.template["metadata"]["labels"].items()
        }

    def delete_pod(self, namespace: str, name: str) -> None:
        owner, _, ordinal = name.rpartition("-")
        self.sets[namespace, "StatefulSet", owner].delete_pod(int(ordinal))

    def evict_worker(self, namespace: str, name: str) -> bool:
        """An eviction, with all budgets that select the pod."""
        controller = self.sets[namespace, "StatefulSet", "workers"]
        labels = self.pods(namespace)[name].template["metadata"]["labels"]
        (budget,) = [
            one["spec"]
            for (where, kind, _), one in self.objects.items()
            if (where, kind) == (namespace, "PodDisruptionBudget")
            and one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        guarded = {
            f"workers-{o}": GuardedPod(
                f"workers-{o}", "workers", p.ready, p.phase == "Pending", p.terminating
            )
            for o, p in controller.pods.items()
        }
        scales = {"workers": controller.spec["replicas"]}
        granted = evict(guarded[name], budget, list(guarded.values()), scales)
        if granted:
            self.delete_pod(namespace, name)
        return granted

    def run_of(self, namespace: str, template: Object) -> str:
        """The run id of pods with this template."""
        (source,) = template["spec"]["containers"][0]["envFrom"]
        name = source["configMapRef"]["name"]
        return str(self.objects[namespace, "ConfigMap", name]["data"]["PET_RDZV_ID"])

    def train_to_the_end(self, namespace: str) -> bool:
        """The workers finish the job; the finisher, if it watches that same run, scales to 0."""
        finisher = self.objects[namespace, "Job", "workers-finisher"]
        workers = self.pods(namespace, {COMPONENT: "worker"}).values()
        watched = self.run_of(namespace, finisher["spec"]["template"])
        if {self.run_of(namespace, pod.template) for pod in workers} != {watched}:
            return False
        self.sets[namespace, "StatefulSet", "workers"].spec["replicas"] = 0
        finisher["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.settle()
        return True


def _three_way(last: Object, wanted: Object, live: Object) -> Object:
    """Fields that are no longer applied are removed; fields added by others are kept."""
    merged = {k: v for k, v in live.items() if k in wanted or k not in last}
    for name, value in wanted.items():
        if isinstance(value, dict) and isinstance(live.get(name), dict):
            before = last.get(name)
            merged[name] = _three_way(before if isinstance(before, dict) else {}, value, live[name])
        else:
            merged[name] = copy.deepcopy(value)
    return merged
