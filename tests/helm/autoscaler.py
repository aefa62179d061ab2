"""KEDA and the HPA it makes, on a clock that the test moves, reading Redis with the commands of a rendered trigger.

KEDA's rules are those of its executor and of its redis-streams scaler (keda.sh/docs, 2.20); the HPA's are in
kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale (algorithm, stabilization window, policies).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.helm.chart import Object

_TOLERANCE = 0.1


def read_trigger(redis: Redis, metadata: Mapping[str, str]) -> int:
    """Return the number that the redis-streams scaler reports; raises `RedisError`."""
    stream, group = metadata["stream"], metadata.get("consumerGroup")
    if group is None:
        return int(redis.execute_command("XLEN", stream))
    if "lagCount" in metadata:
        for info in redis.execute_command("XINFO GROUPS", stream) if redis.exists(stream) else []:
            facts = {_text(key): value for key, value in info.items()}
            if _text(facts["name"]) == group:
                return facts["lag"] if facts["lag"] is not None else 0  # NULL reads as 0
        return int(redis.execute_command("XLEN", stream))  # what KEDA does without the group
    return int(redis.execute_command("XPENDING", stream, group)["pending"])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@dataclass
class Policy:
    window_s: int
    pods: int
    period_s: int

    @classmethod
    def of(cls, rules: Object) -> "Policy":
        (policy,) = rules["policies"]
        return cls(rules["stabilizationWindowSeconds"], policy["value"], policy["periodSeconds"])


@dataclass
class Autoscaler:
    """One ScaledObject. `step` at every second that matters; `replicas` is what the Deployment is set to."""

    scaled: Object
    redis: Redis
    replicas: int
    measure: Callable[[str], float] = lambda query: 0.0
    """Answers the queries of Prometheus triggers."""
    value: float = 0.0
    broken: int = 0
    """Failed looks at Redis in a row."""
    sync_s: float = 15.0
    _last_active: float | None = None
    _next_poll: float = 0.0
    _next_sync: float = 0.0
    _advice: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @property
    def _spec(self) -> Object:
        return self.scaled["spec"]

    def step(self, now: float) -> None:
        if now >= self._next_poll:
            self._next_poll = now + self._spec["pollingInterval"]
            self._poll(now)
        if now >= self._next_sync:
            self._next_sync = now + self.sync_s
            if self.replicas > 0:
                self.sync(now)

    def _poll(self, now: float) -> None:
        if not self.look():
            return
        least = self._spec["minReplicaCount"]
        if self.value > float(self._modifiers["activationTarget"]):
            self._last_active = now
            if self.replicas == 0:
                self._set(now, max(1, least))
        elif self.replicas > least == 0:
            # Nothing was ever active: the first cooldown counts from the object's birth, which is second 0.
            since = now if self._last_active is None else now - self._last_active
            patience = "initialCooldownPeriod" if self._last_active is None else "cooldownPeriod"
            if since >= self._spec[patience]:
                self._set(now, 0)  # from any number in one step

    def sync(self, now: float) -> None:
        """Do what the HPA does every `sync_s`."""
        if not self.look():
            fallback = self._spec["fallback"]
            if self.broken > fallback["failureThreshold"]:
                self._set(now, max(self.replicas, fallback["replicas"]))
            return
        target = float(self._modifiers["target"])
        wanted = math.ceil(self.value / target)
        if abs(self.value / (target * self.replicas) - 1) <= _TOLERANCE:
            wanted = self.replicas
        wanted = max(1, self._spec["minReplicaCount"], min(wanted, self._spec["maxReplicaCount"]))
        self._advice.append((now, wanted))
        self._set(now, self._moderated(now, wanted))

    def _moderated(self, now: float, wanted: int) -> int:
        behavior = self._spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        up, down = Policy.of(behavior["scaleUp"]), Policy.of(behavior["scaleDown"])
        least = min(advice for at, advice in self._advice if at >= now - up.window_s)
        most = max(advice for at, advice in self._advice if at >= now - down.window_s)
        stable = max(least, min(self.replicas, most))
        added = sum(change for at, change in self._changes if change > 0 and at > now - up.period_s)
        removed = -sum(change for at, change in self._changes if change < 0 and at > now - down.period_s)
        if stable > self.replicas:
            return min(stable, self.replicas - added + up.pods) if added < up.pods else self.replicas
        return max(stable, self.replicas + removed - down.pods) if removed < down.pods else self.replicas

    def look(self) -> bool:
        """Read all triggers into `value`; return False if one cannot be read."""
        try:
            values: dict[str, Any] = {}
            for trigger in self._spec["triggers"]:
                metadata = trigger["metadata"]
                asks_redis = trigger["type"] == "redis-streams"
                values[trigger["name"]] = (
                    read_trigger(self.redis, metadata) if asks_redis else self.measure(metadata["query"])
                )
        except RedisError:
            self.broken += 1
            return False
        self.broken = 0
        # The formulas that the chart writes mean the same in Python.
        self.value = float(eval(self._modifiers["formula"], {"__builtins__": {}}, {"max": max, **values}))
        return True

    @property
    def _modifiers(self) -> Object:
        return self._spec["advanced"]["scalingModifiers"]

    def _set(self, now: float, replicas: int) -> None:
        if replicas != self.replicas:
            self._changes.append((now, replicas - self.replicas))
            if replicas == 0:
                self._advice.clear()  # KEDA puts the HPA to rest
            self.replicas = replicas
