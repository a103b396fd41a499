"""Define the Triton kernels that `fused` launches. All arithmetic is float32.

Matrices are contiguous. ``inner`` is the length of their rows, ``BLOCK`` the next power of two; lanes beyond read 0.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl

from agentspec.server_ext.speculator.gpu.fp8 import E4M3_MAX, SMALLEST

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_NEVER = tl.constexpr(float("-inf"))
_FAR = tl.constexpr(3.0e38)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normalize(x, weight, bias, columns, inside, inner, eps):
    """Return w * x / sqrt(mean(x^2) + eps) + b; x is 0 outside the row."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / inner + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return w * (x * scale) + b


@triton.jit
def _sum(projected, embedded, columns, inside, alpha):
    """Return a row of a projection plus alpha times a row of embeddings; 0 outside the row."""
    a = tl.load(projected + columns, mask=inside, other=0.0).to(tl.float32)
    return a + alpha * tl.load(embedded + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_quantized(x, quantized, scales, row, columns, inside, inner):
    """Store a row as E4M3 with its scale: x = quantized * scale. x is 0 outside the row."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), _SMALLEST) / _E4M3_MAX
    tl.store(quantized + row * inner + columns, (x / scale).to(quantized.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def lstm_kernel(
    projected, embedded, cell, cell_weight, cell_bias, state_weight, state_bias, hidden, next_cell, quantized, scales,
    inner, alpha, eps, TIED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `models.LSTMCell`, one row per program, and quantize the new state too."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    gates = projected + row * 4 * inner
    if TIED:
        embeds = embedded + row * inner
        step = 0
    else:
        embeds = embedded + row * 4 * inner
        step = inner
    candidate = _sum(gates + 3 * inner, embeds + 3 * step, columns, inside, alpha)
    c = _gelu(_normalize(candidate, cell_weight, cell_bias, columns, inside, inner, eps))
    c *= _sigmoid(_sum(gates + inner, embeds + step, columns, inside, alpha))
    c += tl.load(cell + row * inner + columns, mask=inside, other=0.0).to(tl.float32) * _sigmoid(
        _sum(gates, embeds, columns, inside, alpha)
    )
    c = tl.where(inside, c, 0.0)
    tl.store(next_cell + row * inner + columns, c.to(next_cell.dtype.element_ty), mask=inside)
    h = _gelu(_normalize(c, state_weight, state_bias, columns, inside, inner, eps))
    h *= _sigmoid(_sum(gates + 2 * inner, embeds + 2 * step, columns, inside, alpha))
    h = tl.where(inside, h, 0.0)
    tl.store(hidden + row * inner + columns, h.to(hidden.dtype.element_ty), mask=inside)
    if QUANTIZE:
        _store_quantized(h, quantized, scales, row, columns, inside, inner)


@triton.jit
def mlp_kernel(
    projected, embedded, weight, bias, hidden, quantized, scales,
    inner, alpha, eps, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `models.SumNormGelu`, one row per program, and quantize the new state too."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    summed = _sum(projected + row * inner, embedded + row * inner, columns, inside, alpha)
    h = tl.where(inside, _gelu(_normalize(summed, weight, bias, columns, inside, inner, eps)), 0.0)
    tl.store(hidden + row * inner + columns, h.to(hidden.dtype.element_ty), mask=inside)
    if QUANTIZE:
        _store_quantized(h, quantized, scales, row, columns, inside, inner)


@triton.jit
def quantize_kernel(x, quantized, scales, inner, BLOCK: tl.constexpr):
    """Compute `fp8.quantize_rows`, one row per program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < inner
    value = tl.load(x + row * inner + columns, mask=inside, other=0.0).to(tl.float32)
    _store_quantized(value, quantized, scales, row, columns, inside, inner)


@triton.jit
def _product(
    inputs, weight, row_scales, weight_scale, v, b, outputs, rows, inner,
    SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return float32 [BLOCK_V, BLOCK_B]: rows v of the weight times inputs b. The weight is the left operand, so its
    rows fill the tensor core's wide side and the few inputs the narrow one."""
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row instead of being masked, so that loads stay wide. Their result is not used.
    weights = weight + tl.minimum(v, outputs - 1).to(tl.int64)[:, None] * inner + k[None, :]
    columns = inputs + tl.minimum(b, rows - 1)[None, :] * inner + k[:, None]
    result = tl.zeros((BLOCK_V, BLOCK_B), tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN:
            w = tl.load(weights + start, eviction_policy="evict_first")
            x = tl.load(columns + start)
        else:
            w = tl.load(weights + start, mask=(k < inner - start)[None, :], other=0.0)
            x = tl.load(columns + start, mask=(k < inner - start)[:, None], other=0.0)
        result = tl.dot(w, x, result, input_precision="ieee")
    if SCALED:
        result *= tl.load(weight_scale) * tl.load(row_scales + b, mask=b < rows, other=0.0)[None, :]
    return result


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    inputs, weight, row_scales, weight_scale, out, rows, outputs, inner,
    SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute `fp8.Fp8Linear`, a block of outputs per program."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    b = tl.arange(0, BLOCK_B)
    result = _product(inputs, weight, row_scales, weight_scale, v, b, outputs, rows, inner,
                      SCALED, EVEN, BLOCK_V, BLOCK_K, BLOCK_B)  # fmt: skip
    places = out + b[None, :] * outputs + v[:, None]
    tl.store(places, result.to(out.dtype.element_ty), mask=(v < outputs)[:, None] & (b < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "width"])
def head_kernel(
    inputs, weight, row_scales, weight_scale, wanted, width, parts, rows, outputs, inner,
    SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute `selection.score`: one part per program, of a block of the head's rows."""
    block = tl.program_id(0)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    b = tl.arange(0, BLOCK_B)
    here = b < rows
    logits = _product(inputs, weight, row_scales, weight_scale, v, b, outputs, rows, inner,
                      SCALED, EVEN, BLOCK_V, BLOCK_K, BLOCK_B)  # fmt: skip
    logits = tl.where((v < outputs)[:, None], logits, _NEVER)
    best = tl.max(logits, axis=0)
    index = tl.min(tl.where(logits == best[None, :], v[:, None], outputs), axis=0)
    total = best + tl.log(tl.sum(tl.exp(logits - best[None, :]), axis=0))
    want = tl.load(wanted + b * width, mask=here, other=-1)
    found = tl.max(tl.where(v[:, None] == want[None, :], logits, _NEVER), axis=0)
    out = parts + (block * rows + b) * 4
    tl.store(out, best, mask=here)
    tl.store(out + 1, tl.minimum(index, outputs - 1).to(tl.float32), mask=here)
    tl.store(out + 2, total, mask=here)
    tl.store(out + 3, found, mask=here)


@triton.jit
def _merge(parts, row, count, rows, BLOCK: tl.constexpr):
    """Merge one row's parts into one: best logit, its index, log-sum-exp, the wanted token's logit."""
    part = tl.arange(0, BLOCK)
    there = part < count
    of = parts + (part * rows + row) * 4
    values = tl.load(of, mask=there, other=_NEVER)
    best = tl.max(values, axis=0)
    # A tie goes to the lowest index, as in the head kernel. A row of NaN still gives an index.
    index = tl.min(tl.where(there & (values == best), tl.load(of + 1, mask=there, other=_FAR), _FAR), axis=0)
    index = tl.where(index < _FAR, index, 0.0)
    totals = tl.load(of + 2, mask=there, other=_NEVER)
    most = tl.max(totals, axis=0)
    total = most + tl.log(tl.sum(tl.exp(totals - most), axis=0))
    return best, index, total, tl.max(tl.load(of + 3, mask=there, other=_NEVER), axis=0)


@triton.jit(do_not_specialize=["count", "rows", "first"])
def merge_kernel(parts, out, count, rows, first, BLOCK: tl.constexpr):
    """Compute `selection.merge`, one row per program."""
    row = tl.program_id(0)
    best, index, total, found = _merge(parts, row, count, rows, BLOCK)
    tl.store(out + row * 4, best)
    tl.store(out + row * 4 + 1, index + first)
    tl.store(out + row * 4 + 2, total)
    tl.store(out + row * 4 + 3, found)


@triton.jit(do_not_specialize=["count", "rows", "stride"])
def choose_kernel(
    parts, given, stride, vocabulary, tokens, probabilities, count, rows, MAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute `selection.choose`: tokens int64 [2, B], probabilities float32 [2, B], first the taken, then the top."""
    row = tl.program_id(0)
    best, index, total, found = _merge(parts, row, count, rows, BLOCK)
    top = index.to(tl.int64)
    if MAPPED:
        top = tl.load(vocabulary + top)
    probability = tl.exp(best - total)
    want = tl.load(given + row * stride)
    tl.store(tokens + row, tl.where(want >= 0, want, top))
    tl.store(tokens + rows + row, top)
    tl.store(probabilities + row, tl.where(want >= 0, tl.exp(found - total), probability))
    tl.store(probabilities + rows + row, probability)
