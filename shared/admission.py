"""The terms on which new requests are accepted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    tenant_limit: int = 0
    """Queued and running requests of one tenant and model, beyond which its submits are refused; 0: no limit. Nobody's
    requests (tenant "") are not counted."""
    replicas: int = 0
    """Replicas of Redis that must have a request before its submit is answered: what is accepted then survives the
    loss of the primary."""
    replica_wait_ms: int = 1000
    """Patience for them. Beyond it the submit is unavailable, and safe to send again."""
