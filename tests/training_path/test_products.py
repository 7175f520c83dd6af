"""16-bit products on a CPU against their definition: exact products, FP32 accumulation, one rounding."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path import arithmetic as module
from mismatch_probe.training_path.arithmetic import CpuProducts, fp32_by_onednn, native_fp16_follows_the_definition
from mismatch_probe.training_path.observation import describe_arithmetic

UNIT_FP32 = 2.0**-24


NATIVE = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
FORMATS = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["own", "native"], autouse=True)
def _whose_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test by this module's products, and of FP16 by PyTorch's own where the processor has such."""
    native = request.param == "native"
    monkeypatch.setattr(module, "native_fp16_follows_the_definition", lambda: native and NATIVE)
    monkeypatch.setattr(module, "has_native_bf16", lambda: False)
    monkeypatch.setattr(module, "fp32_by_onednn", lambda: not native)


def halves(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def rounded_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return exact.float().to(dtype)


def assert_within_a_step(product: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums in another order differ by one step of the format at most, and by little more around 0."""
    torch.testing.assert_close(product, expected, rtol=torch.finfo(expected.dtype).eps, atol=2**-13)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("dtype", FORMATS)
def test_short_sums_are_bitwise_the_definition(dtype: torch.dtype, depth: int) -> None:
    a, b = halves(64, depth, dtype=dtype), halves(depth, 48, seed=1, dtype=dtype)
    with CpuProducts():
        product = a @ b
    assert torch.equal(product, rounded_once(a.double() @ b.double(), dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_that_fp32_holds_exactly_are_bitwise_the_definition_at_any_depth(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-40, 41, (30, 700), generator=generator).to(dtype)
    b = torch.randint(-40, 41, (700, 20), generator=generator).to(dtype) / 64
    with CpuProducts():
        product = a @ b
    assert torch.equal(product, rounded_once(a.double() @ b.double(), dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_long_sums_stay_within_the_bound_of_fp32_accumulation(dtype: torch.dtype) -> None:
    depth = 4096
    a, b = halves(40, depth, dtype=dtype), halves(depth, 30, seed=1, dtype=dtype)
    with CpuProducts():
        product = a @ b
    exact = a.double() @ b.double()
    accumulated = depth * UNIT_FP32 * (a.double().abs() @ b.double().abs())
    half_a_step = torch.finfo(dtype).eps / 2 * (exact.abs() + accumulated)
    assert ((product.double() - exact).abs() <= accumulated + half_a_step).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_accumulating_in_16_bits_would_be_caught_by_that_bound(dtype: torch.dtype) -> None:
    depth = 4096
    a, b = halves(4, depth, dtype=dtype), halves(depth, 3, seed=1, dtype=dtype)
    product = torch.zeros(4, 3, dtype=dtype)
    for k in range(depth):
        product += a[:, k, None] * b[None, k]
    exact = a.double() @ b.double()
    accumulated = depth * UNIT_FP32 * (a.double().abs() @ b.double().abs())
    half_a_step = torch.finfo(dtype).eps / 2 * (exact.abs() + accumulated)
    assert ((product.double() - exact).abs() > accumulated + half_a_step).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_bias_is_added_before_the_rounding(dtype: torch.dtype) -> None:
    x, weight, bias = halves(50, 2, dtype=dtype), halves(40, 2, seed=1, dtype=dtype), halves(40, seed=2, dtype=dtype)
    with CpuProducts():
        outputs = F.linear(x, weight, bias)
    sums = (x.double() @ weight.double().T).float()
    assert torch.equal(outputs, (sums + bias.float()).to(dtype))


def test_overflow_is_infinite_as_in_fp16() -> None:
    with CpuProducts():
        product = torch.full((1, 4), 200.0).half() @ torch.full((4, 1), 200.0).half()
    assert product.isinf().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_spelling_of_a_product_obeys_the_definition(dtype: torch.dtype) -> None:
    x, weight = halves(3, 5, 16, dtype=dtype), halves(8, 16, seed=1, dtype=dtype)
    with CpuProducts():
        products = [
            F.linear(x, weight),
            x @ weight.T,
            torch.einsum("bsd,nd->bsn", x, weight),
            torch.bmm(x, weight.T.expand(3, 16, 8)),
            torch.baddbmm(torch.zeros(3, 5, 8).to(dtype), x, weight.T.expand(3, 16, 8)),
        ]
    expected = (x.float() @ weight.float().T).to(dtype)
    for product in products:
        assert product.dtype == dtype
        assert_within_a_step(product, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_experts_products_obey_the_definition(dtype: torch.dtype) -> None:
    x, experts = halves(6, 16, dtype=dtype), halves(3, 16, 8, seed=1, dtype=dtype)
    with CpuProducts():
        products = F.grouped_mm(x, experts, offs=torch.tensor([2, 2, 6], dtype=torch.int32))
    expected = torch.cat([x[:2].float() @ experts[0].float(), x[2:].float() @ experts[2].float()]).to(dtype)
    assert_within_a_step(products, expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_products_larger_than_the_scratch_are_the_same_in_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = halves(700, 32, dtype=dtype), halves(90, 32, seed=1, dtype=dtype), halves(90, seed=2, dtype=dtype)
    with CpuProducts():
        product = F.linear(x, weight, bias)
        monkeypatch.setattr("mismatch_probe.training_path.arithmetic._SCRATCH_ELEMENTS", 1024)
        in_blocks = F.linear(x, weight, bias)
    assert_within_a_step(in_blocks, product)


def test_attention_is_closer_to_exact_than_fp16_resolves() -> None:
    query, key, value = (halves(2, 4, 33, 32, seed=seed) for seed in range(3))
    with CpuProducts():
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), exact, rtol=2**-10, atol=2**-18)


def test_attention_under_a_mask_is_attention_under_it() -> None:
    query, key, value = (halves(1, 2, 50, 32, seed=seed) for seed in range(3))
    mask = torch.ones(50, 50, dtype=torch.bool).tril().triu(-7)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask)
    with torch.no_grad(), CpuProducts():
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(output.double(), exact, rtol=2**-10, atol=2**-18)


@pytest.mark.parametrize("dtype", FORMATS)
def test_gradients_are_products_of_the_same_definition(dtype: torch.dtype) -> None:
    x, weight = halves(40, 24, dtype=dtype).requires_grad_(), halves(16, 24, seed=1, dtype=dtype).requires_grad_()
    upstream = halves(40, 16, seed=2, dtype=dtype)
    with CpuProducts():
        F.linear(x, weight).backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    assert_within_a_step(x.grad, (upstream.float() @ weight.float()).to(dtype))
    assert_within_a_step(weight.grad, (upstream.float().T @ x.float()).to(dtype))


def test_attention_has_gradients() -> None:
    query, key, value = (halves(1, 2, 9, 32, seed=seed).requires_grad_() for seed in range(3))
    with CpuProducts():
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    doubles = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    F.scaled_dot_product_attention(*doubles, is_causal=True).sum().backward()
    for half, double in zip((query, key, value), doubles, strict=True):
        assert half.grad is not None
        assert double.grad is not None
        torch.testing.assert_close(half.grad.double(), double.grad, rtol=2**-9, atol=2**-10)


@pytest.mark.parametrize("dtype", FORMATS)
def test_casts_of_autocast_are_followed(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 12), torch.randn(5, 12)
    with torch.autocast("cpu", dtype=dtype), CpuProducts():
        product = F.linear(x, weight)
    assert_within_a_step(product, (x.to(dtype).float() @ weight.to(dtype).float().T).to(dtype))


def test_fp32_products_are_fp32() -> None:
    x, weight, bias = torch.randn(33, 64), torch.randn(20, 64), torch.randn(20)
    with CpuProducts():
        product = F.linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=2e-5)


def test_views_of_larger_matrices_multiply_as_their_copies() -> None:
    wide, tall = torch.randn(20, 90), torch.randn(90, 40)
    with CpuProducts():
        product = wide[:, 5:35] @ tall[10:70:2, 3:]
    exact = wide[:, 5:35].double() @ tall[10:70:2, 3:].double()
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", FORMATS)
def test_an_addend_and_both_sums_have_their_factors(dtype: torch.dtype) -> None:
    a, b, addend = (halves(40, 40, seed=seed, dtype=dtype) for seed in range(3))
    with CpuProducts():
        product = torch.addmm(addend, a, b, alpha=2, beta=0.5)
        without = torch.addmm(torch.full_like(addend, torch.nan), a, b, beta=0)
    sums = a.float() @ b.float()
    assert_within_a_step(product, (2 * sums + 0.5 * addend.float()).to(dtype))
    assert_within_a_step(without, sums.to(dtype))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (24,), (3, 0)])
def test_a_linear_of_inference_mode_takes_every_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, weight = halves(*shape, dtype=dtype), halves(16, shape[-1], seed=1, dtype=dtype)
    with CpuProducts(), torch.inference_mode():
        output = F.linear(inputs, weight)
        dot = F.linear(inputs, weight[0])
    assert output.shape == (*shape[:-1], 16)
    assert dot.shape == shape[:-1]
    assert_within_a_step(output, F.linear(inputs.float(), weight.float()).to(dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_two_formats_in_one_product_are_refused_as_without_it(dtype: torch.dtype) -> None:
    with CpuProducts(), pytest.raises(RuntimeError, match="dtype"):
        halves(40, 8, dtype=dtype) @ torch.randn(8, 4)


@pytest.mark.parametrize("dtype", FORMATS)
def test_experts_products_may_name_their_own_format(dtype: torch.dtype) -> None:
    x, experts = halves(6, 16, dtype=dtype), halves(3, 16, 8, seed=1, dtype=dtype)
    offs = torch.tensor([2, 2, 6], dtype=torch.int32)
    with CpuProducts():
        assert torch.equal(F.grouped_mm(x, experts, offs=offs, out_dtype=dtype), F.grouped_mm(x, experts, offs=offs))


@pytest.mark.parametrize(("rows", "is_own"), [(15, False), (16, True)])
def test_bf16_products_of_few_rows_are_pytorchs_own(rows: int, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias = halves(rows, 24, dtype=torch.bfloat16), halves(16, 24, dtype=torch.bfloat16), torch.ones(16).bfloat16()
    widened = []
    monkeypatch.setattr(module, "_padded_product", lambda a, b: widened.append(a) or torch.mm(a, b))
    with CpuProducts():
        for product in (lambda: a @ b.T, lambda: F.linear(a, b), lambda: torch.addmm(bias, a, b.T)):
            widened.clear()
            assert product().shape == (rows, 16)
            assert bool(widened) == is_own


def test_every_bf16_operator_is_replaced_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = []
    own = module._16_bit_product
    monkeypatch.setattr(
        module, "_16_bit_product", lambda func, args, kwargs: replaced.append(func) or own(func, args, kwargs)
    )
    a, b = (halves(20, 20, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    with CpuProducts(), torch.no_grad():
        products = [
            a @ b, torch.addmm(a, a, b), F.linear(a, b), torch.bmm(a[None], b[None]), a @ b[0], torch.dot(a[0], b[0]),
            torch.addmv(a[0], a, b[0]), torch.baddbmm(a[None], a[None], b[None]),
            F.grouped_mm(a, b[None], offs=torch.tensor([20], dtype=torch.int32)),
        ]  # fmt: skip
    assert len(replaced) == len(products)


@pytest.mark.parametrize("native", [True, False])
def test_a_scoring_pass_enters_them_for_bf16_where_the_processor_has_none(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_native_bf16", lambda: native)
    scoring = module.Arithmetic(Dtype.BF16, "cpu", None, is_reference=False)
    assert scoring.defines_cpu_products is not native
    assert describe_arithmetic(scoring)["bf16_products"].startswith("native" if native else "accumulated in fp32")
    assert not module.Arithmetic(Dtype.BF16, "cuda", None, is_reference=False).defines_cpu_products


def test_fp64_is_left_alone() -> None:
    a, b = torch.randn(9, 8).double(), torch.randn(8, 7).double()
    plain = a @ b
    with CpuProducts():
        assert torch.equal(a @ b, plain)


@pytest.mark.parametrize("native", [True, False])
def test_bf16_is_left_alone_where_the_processor_has_products_of_it(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_native_bf16", lambda: native)
    replaced = []
    monkeypatch.setattr(module, "_16_bit_product", lambda func, args, kwargs: replaced.append(func) or func(*args))
    inputs = [halves(1, 2, 6, 16, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    with torch.no_grad(), CpuProducts():
        torch.bmm(inputs[0][0], inputs[1][0].mT)
        inputs[0][0, 0] @ inputs[1][0, 0].T
        assert len(replaced) == (0 if native else 2)
        F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert len(replaced) == (0 if native else 2)


@pytest.mark.parametrize("dtype", FORMATS)
def test_empty_products_are_zero(dtype: torch.dtype) -> None:
    with CpuProducts():
        assert torch.equal(halves(3, 0, dtype=dtype) @ halves(0, 2, dtype=dtype), torch.zeros(3, 2).to(dtype))
        assert (halves(0, 4, dtype=dtype) @ halves(4, 2, dtype=dtype)).shape == (0, 2)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_linear_of_inference_mode_is_that_of_a_training_step(dtype: torch.dtype, with_bias: bool) -> None:
    inputs, weight = halves(3, 5, 64, dtype=dtype), halves(16, 64, seed=1, dtype=dtype)
    bias = halves(16, seed=2, dtype=dtype) if with_bias else None
    with CpuProducts():
        trained = F.linear(inputs, weight, bias)
        with torch.inference_mode():
            inferred = F.linear(inputs, weight, bias)
    assert inferred.shape == (3, 5, 16)
    assert torch.equal(trained, inferred)


def test_attention_gradients_of_bf16_are_those_of_fp32_rounded_once() -> None:
    gradients = {}
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [halves(2, 3, 20, 16, seed=seed).to(torch.bfloat16).to(dtype).requires_grad_() for seed in range(3)]
        with CpuProducts():
            F.scaled_dot_product_attention(*inputs, is_causal=True).sum().backward()
        gradients[dtype] = torch.stack([tensor.grad for tensor in inputs])  # type: ignore[arg-type]
    rounding = 2.0**-8 * gradients[torch.float32].abs().max()
    assert (gradients[torch.bfloat16].float() - gradients[torch.float32]).abs().max() < 4 * rounding


def test_a_processors_own_products_are_taken_where_it_has_some_that_follow_the_definition() -> None:
    native_fp16_follows_the_definition.cache_clear()
    with CpuProducts():
        assert native_fp16_follows_the_definition() == NATIVE


@pytest.mark.parametrize(("vendor", "expected"), [("GenuineIntel", False), ("AuthenticAMD", True), (None, True)])
def test_intels_processors_keep_their_own_library(
    vendor: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if vendor is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
    assert fp32_by_onednn.__wrapped__() is expected


def test_products_accumulated_in_fp16_do_not_pass_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_fp16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[None, k]
        return total

    a, b, bias = halves(8, 512, scale=8).round(), halves(512, 8, seed=1, scale=8).round(), torch.zeros(8).half()
    assert module._passes_trial(a, b, bias) or not NATIVE
    monkeypatch.setattr(torch, "mm", in_fp16)
    assert not module._passes_trial(a, b, bias)
