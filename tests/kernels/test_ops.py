"""How an operation finds its twin."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

import kernels
from kernels.dispatch import Op


def test_the_fused_twin_is_not_called_for_a_tensor_on_the_cpu() -> None:
    op = Op(reference=lambda x: x + 1, fused=lambda x: x + 2)

    assert op(torch.zeros(())).item() == 1


@pytest.mark.parametrize("name", [name for name, op in vars(kernels).items() if isinstance(op, Op)])
def test_an_op_is_called_like_its_reference_and_its_twin_takes_the_same_arguments(name: str) -> None:
    """Read, not imported: there may be no Triton."""
    made = next(
        node.value
        for node in ast.parse(Path(kernels.__file__).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    reference = getattr(kernels, name).reference
    assert isinstance(made, ast.Call)
    assert isinstance(made.args[1], ast.Call)
    module, twin = (ast.literal_eval(each) for each in made.args[1].args)
    source = (Path(kernels.__file__).parent / "gpu" / f"{module}.py").read_text()
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == twin)

    assert reference.__name__ == twin == name
    arguments = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    assert arguments == list(inspect.signature(reference).parameters)
