"""Products in FP8 of the built-in program, on a CPU: torch's scaled products run there, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.search_spaces.job import load_job

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

#: Half a step between neighbouring values of a format, as a share of the smaller: 3 bits of
#: mantissa, and 2.
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
SCALINGS = ("tensorwise", "rowwise")


@pytest.fixture(autouse=True, scope="module")
def program() -> Iterator[None]:
    folder = str(Path(__file__).parents[3] / "workload" / "program")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def matrix(rows: int, columns: int, seed: int) -> Any:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16()


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_cast_fills_the_format_and_is_within_its_step(scaling: str, form: str) -> None:
    import fp8

    kind = {"e4m3": fp8.E4M3, "e5m2": fp8.E5M2}[form]
    values = matrix(32, 64, 0)
    values[5] *= 1000
    values[7] = 0
    made, scale = fp8.cast(values, kind, scaling)
    top = made.float().abs().amax(dim=1)
    full = torch.finfo(kind).max
    assert top[5] == full
    assert bool(made.float().isfinite().all())
    # Each row but that of zeros has a scale of its own, or the largest row alone is full.
    assert int((top == full).sum()) == (31 if scaling == "rowwise" else 1)
    back, exact = made.float() * scale, values.float()
    # Below the normal range steps are of one size.
    least = torch.finfo(kind).smallest_normal * scale
    limit = (HALF_STEP[form] + 2**-8) * exact.abs().maximum(least.expand_as(exact))
    assert bool(((back - exact).abs() <= limit).all())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_product_is_the_exact_one_within_the_formats_error(scaling: str) -> None:
    import fp8

    left, right = matrix(48, 128, 1), matrix(96, 128, 2)
    left[3] *= 300  # one row that would cost the others their precision under one scale
    made, exact = fp8.product(left, right, scaling).float(), left.float() @ right.float().t()
    error = (made - exact).norm(dim=1) / exact.norm(dim=1)
    # Independent errors of both operands: at most half a step each, on average less.
    assert float(error[3]) < 2 * HALF_STEP["e4m3"] * 2**0.5
    assert 0.01 < float(error.median()) < 2 * HALF_STEP["e4m3"]
    tiny = left.clone()
    tiny[3] *= 300  # 1e5 times the others: under one scale they fall below the format
    coarse = (fp8.product(tiny, right, scaling).float() - tiny.float() @ right.float().t())[0]
    lost = float(coarse.norm() / exact[0].norm())
    assert (lost < 2 * HALF_STEP["e4m3"]) is (scaling == "rowwise")


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-opt", "tiny-qwen2.5"])
def test_a_model_learns_nearly_the_same(name: str) -> None:
    import causal_lm
    import fp8

    job = load_job(name)
    job = replace(job, sequence_length=32, model={**job.model, "num_hidden_layers": 2})
    tokens = causal_lm.tokens_of_step(job.to_json(), 0)[:2, :-1]
    found = {}
    for scaling in ("none", *SCALINGS):
        for kept in ("none", "selective"):
            model = causal_lm.build_model(job.to_json(), kept).to(torch.bfloat16)
            if scaling != "none":
                blocks = causal_lm.blocks_of(model)
                before = [p for p in blocks.modules() if type(p) is torch.nn.Linear]
                fp8.convert(blocks, scaling)
                made = [p for p in model.modules() if type(p) is fp8.Fp8Linear]
                assert made == before
                assert len(made) in (12, 14)  # of two blocks: six, or seven with a gate
                assert type(model.lm_head) is torch.nn.Linear
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            gradients = torch.cat([p.grad.float().flatten() for p in model.parameters()])
            found[scaling, kept] = float(loss.detach()), gradients
        # Operator by operator or whole, the backward pass is of the same values.
        assert torch.equal(found[scaling, "none"][1], found[scaling, "selective"][1])
    loss, gradients = found["none", "none"]
    for scaling in SCALINGS:
        other, changed = found[scaling, "none"]
        assert other == pytest.approx(loss, rel=0.01)
        apart = float((changed - gradients).norm() / gradients.norm())
        assert 0.001 < apart < 0.25


def test_blocks_in_fp8_are_compiled_whole() -> None:
    import causal_lm
    import fp8

    job = load_job("tiny-gpt")
    job = replace(job, sequence_length=16, model={**job.model, "num_hidden_layers": 1})
    model = causal_lm.build_model(job.to_json(), "none").to(torch.bfloat16)
    layer = next(p for p in causal_lm.blocks_of(model)[0].modules() if type(p) is torch.nn.Linear)
    fp8.convert(causal_lm.blocks_of(model), "rowwise")
    values = matrix(16, layer.in_features, 3).requires_grad_()
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, traced):
        values.grad = None
        out = call(values)
        out.sum().backward()
        results.append((out.detach(), values.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
