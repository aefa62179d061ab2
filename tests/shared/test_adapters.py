"""Adapter folders from anywhere: what cannot be served is refused, and the field at fault is named."""

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.adapters import (
    CONFIG,
    WEIGHTS,
    InvalidAdapter,
    check_adapter,
    check_values,
    digest_of,
    find_folder,
    pack_targets,
    read_shapes,
    unpack_targets,
)

TARGETS = {"model.layers.0.q_proj": (8, 6), "model.layers.1.q_proj": (8, 6), "model.layers.0.down": (6, 12)}
GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "down"],
    "bias": "none",
    "task_type": None,
    "base_model_name_or_path": "somewhere",
    "unknown_to_us": {"a": 1},
}


def tensors(rank: int = 4, targets: Mapping[str, tuple[int, int]] = TARGETS) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in targets.items():
        found[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
        found[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
    return found


def write(folder: Path, config: object = GOOD, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in (tensors() if shapes is None else shapes).items():
        size = 4
        for part in shape:
            size *= part
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    content = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content + bytes(at))
    return folder


def test_a_good_adapter_tells_its_rank_factor_and_modules(tmp_path: Path) -> None:
    facts = check_adapter(write(tmp_path / "a"), TARGETS)
    assert (facts.rank, facts.factor, facts.modules) == (4, 4.0, tuple(sorted(TARGETS)))
    assert facts.parameters == 4 * (14 + 14 + 18)
    stable = check_adapter(write(tmp_path / "b", GOOD | {"use_rslora": True}), TARGETS)
    assert stable.factor == 8.0
    for begun in (True, False, None, "gaussian", "eva", "orthogonal"):
        assert check_adapter(write(tmp_path / "d", GOOD | {"init_lora_weights": begun}), TARGETS) == facts
    pattern = check_adapter(write(tmp_path / "c", GOOD | {"target_modules": ".*"}), TARGETS)
    assert pattern.modules == facts.modules


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"r": 8}, "r"),
        ({"r": 0}, "r"),
        ({"r": True}, "r"),
        ({"r": None}, "r"),
        ({"r": 4096}, "r"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": -1e30}, "lora_alpha"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {}}, "arrow_config"),
        ({"kasa_config": {}}, "kasa_config"),
        ({"monteclora_config": {}}, "monteclora_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_modules": ["q_proj", "down", "k_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter(write(tmp_path / "a", GOOD | changes), TARGETS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("shapes", "field"),
    [
        (tensors(targets={"model.layers.7.q_proj": (8, 6)}), "target_modules"),
        (tensors(targets=TARGETS | {"lm_head": (8, 6)}), "target_modules"),
        (tensors(rank=5), "r"),
        (tensors(targets=TARGETS | {"model.layers.0.down": (6, 13)}), WEIGHTS),
        (tensors(targets=TARGETS | {"model.layers.0.down": (7, 12)}), WEIGHTS),
        (dict(list(tensors().items())[1:]), WEIGHTS),
        (tensors() | {"base_model.model.lm_head.weight": (3, 3)}, WEIGHTS),
        (tensors() | {"base_model.model.model.layers.0.q_proj.lora_A.weight": (4, 6, 1)}, WEIGHTS),
        ({}, WEIGHTS),
    ],
    ids=["layer", "module", "rank", "inputs", "outputs", "half", "foreign", "cube", "empty"],
)
def test_tensors_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], field: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter(write(tmp_path / "a", shapes=shapes), TARGETS)
    assert caught.value.field == field


def test_an_adapter_of_experts_is_refused_in_so_many_words(tmp_path: Path) -> None:
    weights = tensors(targets=TARGETS | {"model.layers.0.mlp.experts.3.gate_proj": (8, 6)})
    with pytest.raises(InvalidAdapter, match="adapters of experts are not served") as told:
        check_adapter(write(tmp_path / "x", GOOD | {"target_modules": ".*"}, weights), TARGETS)
    assert told.value.field == "target_modules"


def test_a_pickle_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=r"^adapter_model\.bin: is a pickle"):
        check_adapter(folder, TARGETS)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(InvalidAdapter, match=f"^{name}: is missing"):
        check_adapter(folder, TARGETS)


def test_only_folders_inside_the_store_are_found(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    inside, outside = write(store / "a"), write(tmp_path / "outside")
    (store / "link").symlink_to(outside)
    (store / "kin").symlink_to(inside)
    assert find_folder(store, "a") == find_folder(store, "kin") == find_folder(store, str(inside)) == inside
    for path in (
        "../outside",
        "a/../../outside",
        str(outside),
        "link",
        "",
        ".",
        "nowhere",
        "a/adapter_config.json",
        "\0",
    ):
        with pytest.raises(InvalidAdapter) as caught:
            find_folder(store, path)
        assert caught.value.field == "path"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path, outside: path.symlink_to(outside), "leads out of the model store"),
        (lambda path, outside: path.symlink_to("/dev/zero"), "leads out of the model store"),
        (lambda path, outside: path.symlink_to(path), "leads nowhere|not a file"),
        (lambda path, outside: os.mkfifo(path), "is not a file"),
        (lambda path, outside: path.mkdir(), "is not a file"),
    ],
    ids=["link-out", "device", "loop", "pipe", "folder"],
)
def test_files_that_are_none_or_lie_elsewhere_are_refused_unread(
    tmp_path: Path, name: str, make: Callable[[Path, Path], None], why: str
) -> None:
    store, outside = tmp_path / "store", write(tmp_path / "outside")
    store.mkdir()
    folder = write(store / "a")
    (folder / name).unlink()
    make(folder / name, outside / name)
    with pytest.raises(InvalidAdapter, match=why) as caught:
        find_folder(store, "a")
    assert caught.value.field == name


def test_files_that_are_links_within_the_store_are_served(tmp_path: Path) -> None:
    kept, folder = write(tmp_path / "kept"), tmp_path / "a"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).symlink_to(Path("..") / "kept" / name)
    assert check_adapter(find_folder(tmp_path, "a"), TARGETS) == check_adapter(kept, TARGETS)


@pytest.mark.parametrize("content", [b"[" * 100_000, b" " * (5 * 2**20) + b"{}", b"\xff\xfe", b""])
def test_a_configuration_that_no_parser_takes_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "a")
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter(folder, TARGETS)
    assert caught.value.field == CONFIG


A, B = "base_model.model.model.layers.0.q_proj.lora_A.weight", "base_model.model.model.layers.0.q_proj.lora_B.weight"


def entry(shape: object, first: object, end: object, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({A: entry([4, 6], 0, 96), B: entry([8, 4], 96, 224)}, 223),
        ({A: entry([4, 6], 0, 96), B: entry([8, 4], 96, 224)}, 225),
        ({A: entry([4, 6], 0, 96), B: entry([8, 4], 0, 128)}, 128),
        ({A: entry([4, 6], 0, 96), B: entry([8, 4], 100, 228)}, 228),
        ({A: entry([4, 6], -96, 0), B: entry([8, 4], 0, 128)}, 128),
        ({A: entry(["4", 6], 0, 96)}, 96),
        ({A: entry([4.0, 6], 0, 96)}, 96),
        ({A: entry([True, 24], 0, 96)}, 96),
        ({A: entry([float("inf"), 6], 0, 96)}, 96),
        ({A: entry([10**30, 0], 0, 0)}, 0),
        ({A: entry("46", 0, 96)}, 96),
    ],
    ids=[
        "short",
        "long",
        "overlap",
        "gap",
        "before",
        "text",
        "fraction",
        "truth",
        "endless",
        "immense",
        "word",
    ],
)
def test_what_is_no_safetensors_file_to_others_is_none_to_the_front(
    tmp_path: Path, header: dict[str, Any], data: int
) -> None:
    folder = write(tmp_path / "a", GOOD | {"target_modules": ["q_proj"]})
    content = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content + bytes(data))
    with pytest.raises(InvalidAdapter) as caught:
        check_adapter(folder, TARGETS)
    assert caught.value.field == WEIGHTS


def test_a_header_without_end_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    content = b'{"a":' * 100_000
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(InvalidAdapter, match="is not a safetensors file"):
        check_adapter(folder, TARGETS)


def _write_tensors(folder: Path, values: Mapping[str, tuple[str, bytes]]) -> Path:
    """Write tensors of one dimension, each of a dtype and its bytes."""
    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, content) in values.items():
        header[name] = entry([len(content) // (4 if dtype == "F32" else 2)], at, at + len(content), dtype)
        at += len(content)
    head = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(
        struct.pack("<Q", len(head)) + head + b"".join(content for _, content in values.values())
    )
    return folder


def _floats(dtype: str, content: bytes) -> list[float]:
    if dtype == "BF16":
        halves = struct.unpack(f"<{len(content) // 2}H", content)
        content = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
    code, size = ("e", 2) if dtype == "F16" else ("f", 4)
    return list(struct.unpack(f"<{len(content) // size}{code}", content))


# Bytes around the edges of what is finite, more often than chance would have them.
_BYTES = st.lists(st.sampled_from([0x00, 0x7B, 0x7C, 0x7E, 0x7F, 0x80, 0xFB, 0xFC, 0xFE, 0xFF]), max_size=12)


@given(
    tensors=st.dictionaries(
        st.sampled_from(["a", "b", "c"]),
        st.tuples(
            st.sampled_from(["F32", "F16", "BF16"]),
            _BYTES.map(lambda values: bytes(values[: len(values) // 4 * 4])),
        ),
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_adapter_passes_exactly_if_all_values_of_its_tensors_are_finite(
    tmp_path: Path, tensors: dict[str, tuple[str, bytes]]
) -> None:
    folder = _write_tensors(tmp_path / "a", tensors)
    at_fault = [name for name, part in tensors.items() if not all(map(math.isfinite, _floats(*part)))]
    if not at_fault:
        check_values(folder)
        return
    with pytest.raises(InvalidAdapter) as caught:
        check_values(folder)
    assert caught.value.field == WEIGHTS
    assert caught.value.message.startswith(f"{at_fault[0]} holds values that are not finite")


@pytest.mark.parametrize("place", [0, 2**17 - 1, 2**17, 300_000, 2**19 - 1])
@pytest.mark.parametrize(("dtype", "nan"), [("F16", 0x7C01), ("BF16", 0xFF80)])
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(
    tmp_path: Path, place: int, dtype: str, nan: int
) -> None:
    content = bytearray(2**20)
    struct.pack_into("<H", content, 2 * place, nan)
    folder = _write_tensors(tmp_path / "a", {"fine": ("F32", bytes(12)), "faulty": (dtype, bytes(content))})
    with pytest.raises(InvalidAdapter, match="faulty holds values that are not finite"):
        check_values(folder)


def test_values_are_read_in_little_memory(tmp_path: Path) -> None:
    folder = _write_tensors(tmp_path / "a", {"wide": ("F32", bytes(2**25))})
    tracemalloc.start()
    try:
        check_values(folder)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_every_file_counts_in_the_digest(tmp_path: Path) -> None:
    first = digest_of(write(tmp_path / "a"))
    assert first == digest_of(write(tmp_path / "b"))
    assert first != digest_of(write(tmp_path / "a", GOOD | {"lora_alpha": 17}))
    assert first != digest_of(write(tmp_path / "b", shapes=tensors(rank=2)))


def test_targets_survive_the_card() -> None:
    assert unpack_targets(pack_targets(TARGETS)) == TARGETS


@given(content=st.binary(max_size=200))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_either_refused_or_name_no_tensor(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / WEIGHTS
    path.write_bytes(content)
    try:
        assert read_shapes(path) == {}
    except InvalidAdapter as error:
        assert error.field == WEIGHTS


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize(
    "field", ["r", "lora_alpha", "target_modules", "bias", "peft_type", "use_rslora", "init_lora_weights"]
)
def test_any_value_in_a_field_is_taken_or_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    try:
        check_adapter(write(tmp_path / "a", GOOD | {field: value}), TARGETS)
    except InvalidAdapter as error:
        assert error.field == field
