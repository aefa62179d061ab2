"""Every Redis name that only fronts and their jobs use; those of the fleet are in `shared.keys`.

What belongs to one object shares its hash tag. A `tenant` is the id of an API key, empty where there are none: objects
of one are unknown to the others.
"""


def limit_keys(caller: str) -> list[str]:
    """Strings with the TTL of their own refill: when the limits of a caller are full again."""
    return [f"df:{{limit.{caller}}}:requests", f"df:{{limit.{caller}}}:tokens"]


def response(tenant: str, response_id: str) -> str:
    """Hash with a TTL: what a stored response was asked with; what it says is in its request's log."""
    return f"df:{{response.{tenant}.{response_id}}}"


def file(tenant: str, file_id: str) -> str:
    """Hash with a TTL: the file object."""
    return f"df:{{file.{tenant}.{file_id}}}:object"


def file_bytes(tenant: str, file_id: str) -> str:
    """Hash with the TTL of its object: numbered pieces of the content."""
    return f"df:{{file.{tenant}.{file_id}}}:bytes"


def files(tenant: str) -> str:
    """Sorted set with a TTL: file ids by the time (ms) at which they expire."""
    return f"df:{{files.{tenant}}}:index"


def file_sizes(tenant: str) -> str:
    """Hash with a TTL: bytes of each file of a tenant."""
    return f"df:{{files.{tenant}}}:sizes"


def batch(tenant: str, batch_id: str) -> str:
    """Hash with a TTL: the batch object."""
    return f"df:{{batch.{tenant}.{batch_id}}}:object"


def batch_lines(tenant: str, batch_id: str) -> str:
    """Hash with a TTL: outcome of each line that has ended, by its number."""
    return f"df:{{batch.{tenant}.{batch_id}}}:lines"


def batch_lease(tenant: str, batch_id: str) -> str:
    """String with a short TTL: the job process that runs the batch."""
    return f"df:{{batch.{tenant}.{batch_id}}}:lease"


def batches(tenant: str) -> str:
    """Sorted set with a TTL: batch ids by the time (ms) at which they expire."""
    return f"df:{{batches.{tenant}}}:index"


OPEN_BATCHES = "df:{batches}:open"
"""Sorted set with a TTL: `<tenant>/<batch id>` of batches that have not ended, by the time (ms) of their end."""

JOBS = "df:jobs"
"""arq's queue, a sorted set without TTL: the next runs of what recurs are always in it."""
