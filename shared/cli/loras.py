"""`diffleet loras`: the adapters of a fleet, listed, registered and forgotten through its api."""

from collections.abc import Mapping
from typing import Any

from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import connected, refusal
from shared.cli.numbers import number
from shared.cli.requests import print_table, table_of


async def print_loras(url: str, model: str | None) -> None:
    """Print the adapters of a model, or of all; raises `Stop`."""
    found = await _call(url, "GET", "/admin/loras", {"model": model})
    if not found["data"]:
        print("no adapter is registered")
        return
    table = table_of("adapter", "model", "path", "loaded by", right=("rank", "parameters"))
    for one in found["data"]:
        holders = " ".join(one["workers"]) or "-"
        table.add_row(one["name"], one["model"], one["path"], holders, str(one["rank"]), f"{one['parameters']:,}")
    print_table(table)


async def add_lora(url: str, model: str | None, name: str, path: str) -> None:
    """Register an adapter and print what was found in it; raises `Stop` naming the field at fault."""
    body = {"name": name, "path": path} | ({} if model is None else {"model": model})
    added = await _call(url, "POST", "/admin/loras", {}, body)
    print(f"{added['model']}:{added['name']}  rank {added['rank']}, {added['parameters']:,} parameters")


async def remove_lora(url: str, model: str | None, name: str) -> None:
    """Forget an adapter; raises `Stop` if it is not there."""
    gone = await _call(url, "DELETE", f"/admin/loras/{name}", {"model": model})
    print(f"{gone['model']}:{gone['name']}  forgotten; its files stay")


async def _call(
    url: str,
    method: str,
    path: str,
    asked: Mapping[str, str | None],
    body: Mapping[str, str] | None = None,
) -> Any:
    params = {name: value for name, value in asked.items() if value is not None}
    async with connected(url) as client:
        response = await client.request(method, path, params=params, json=body)
    if response.status_code != 200:
        raise refusal(response.status_code, response.content)
    return response.json()


def use_of(argument: str) -> tuple[str, float]:
    """Return name and scale of `NAME` or `NAME:SCALE`; raises ValueError."""
    name, colon, scale = argument.partition(":")
    if not name or (colon and not scale):
        raise ValueError(f"{argument!r} is not NAME or NAME:SCALE")
    try:
        return name, number(scale) if colon else 1.0
    except ValueError as error:
        raise ValueError(f"{argument!r}: {error}") from None


def stop_unknown(model: str, name: str) -> Stop:
    return Stop(Exit.REFUSED, f"model {model} has no adapter {name[:96]!r}")
