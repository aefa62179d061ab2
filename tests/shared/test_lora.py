"""The registry of adapters on the real server."""

import pytest

from shared.connection import Link
from shared.keys import loras
from shared.lora import AdapterRecord, AdapterRegistry
from shared.roster import WorkerInfo

MODEL = "tiny"


def record(name: str, digit: str = "0") -> AdapterRecord:
    return AdapterRecord(name, f"team/{name}", digit * 64, 4, 100, 1)


async def test_an_adapter_is_found_by_its_name_until_it_is_removed_or_replaced(link: Link) -> None:
    registry = AdapterRegistry(link)
    for name in ("fox", "owl"):
        await registry.add(MODEL, record(name))
    assert await registry.find(MODEL, ["fox", "nobody"]) == {"fox": record("fox")}
    assert await registry.find("other", ["fox"]) == {}
    await registry.add(MODEL, record("fox", "1"))
    assert await registry.find(MODEL, ["owl", "fox", "fox"]) == {"owl": record("owl"), "fox": record("fox", "1")}
    assert [each.name for each in await registry.list(MODEL)] == ["fox", "owl"]
    assert await registry.remove(MODEL, "fox")
    assert await registry.find(MODEL, ["fox"]) == {}
    assert not await registry.remove(MODEL, "fox")
    await registry.remove(MODEL, "owl")


@pytest.mark.parametrize(
    ("adapters", "digests", "loaded"),
    [
        (("fox",), ("0" * 64,), ["fox", "twin"]),
        (("gone",), ("0" * 64,), ["fox", "twin"]),
        (("owl",), ("1" * 64,), ["owl"]),
        (("fox",), ("2" * 64,), []),
        (("fox",), (), ["fox"]),
        ((), (), []),
    ],
    ids=["one-of-two-names", "under-a-name-that-has-gone", "another", "files-of-before", "an-older-worker", "none"],
)
def test_an_adapter_is_loaded_where_its_files_are_whatever_they_are_called(
    adapters: tuple[str, ...], digests: tuple[str, ...], loaded: list[str]
) -> None:
    worker = WorkerInfo("w", MODEL, "ready", adapters=adapters, adapter_digests=digests)
    registered = (record("fox"), record("twin"), record("owl", "1"))
    assert [each.name for each in registered if each.is_loaded(worker)] == loaded


@pytest.mark.parametrize("name", ["", "\ud800", "a b", "x" * 97, "\0", "../fox"])
async def test_what_can_be_no_adapters_name_is_not_found(link: Link, name: str) -> None:
    registry = AdapterRegistry(link)
    await registry.add(MODEL, record("fox"))
    assert await registry.find(MODEL, [name]) == {}
    assert await registry.find(MODEL, [name, "fox"]) == {"fox": record("fox")}
    await registry.remove(MODEL, "fox")


async def test_a_record_that_is_none_is_not_found(link: Link) -> None:
    registry = AdapterRegistry(link)
    await registry.add(MODEL, record("fox"))
    for content in (b"not json", b"{}", b"[]"):
        await link.read("HSET", loras(MODEL), "owl", content)
        assert await registry.find(MODEL, ["owl", "fox"]) == {"fox": record("fox")}
        assert await registry.list(MODEL) == [record("fox")]
    for name in ("fox", "owl"):
        await registry.remove(MODEL, name)
