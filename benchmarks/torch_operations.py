"""What each operation of torch's profiler is, told from its name and those that it ran in."""

from __future__ import annotations

from torch_pipelining import Operation
from work_kinds import (
    AGAIN,
    ATTENTION,
    CLIPPING,
    CORE,
    ENDS,
    EXCHANGE,
    FORWARD,
    GELU,
    GRADIENT,
    HEADS,
    NORMS,
    OPTIMISER,
    REDUCTION,
    RESIDUAL,
    REST,
    SLOTS,
    SUMS,
    ZEROS,
    Shapes,
    Work,
)

NORM, WAIT = "gradient norm", "wait"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_OPERATIONS = {  # the first that an operation is or ran in decides
    NORM: CLIPPING,
    "torch::autograd::AccumulateGrad": SUMS,
    "Optimizer.step#AdamW.step": OPTIMISER,
    **dict.fromkeys((WAIT, "c10d::send", "c10d::recv_"), EXCHANGE),
    **dict.fromkeys(("aten::native_layer_norm", "aten::native_layer_norm_backward"), NORMS),
    **dict.fromkeys(("aten::gelu", "aten::gelu_backward"), GELU),
    **dict.fromkeys(("aten::embedding", "aten::embedding_dense_backward"), ENDS),
    **dict.fromkeys(("aten::cross_entropy_loss", "aten::nll_loss_backward"), ENDS),
    "aten::_log_softmax_backward_data": ENDS,
    **dict.fromkeys(("aten::add", "aten::add_", "aten::sum"), RESIDUAL),
    **dict.fromkeys(("aten::clone", "aten::stack", "aten::contiguous"), HEADS),
    **dict.fromkeys(("aten::zeros", "aten::zero_"), ZEROS),
    **dict.fromkeys(("aten::div_", "aten::mul_"), CLIPPING),
    "aten::copy_": SLOTS,
}


def torch_work(operation: Operation, shapes: Shapes) -> Work:
    name, within, sizes = operation.within[0], operation.within, operation.shapes
    inner = next((x for x in within if x == "aten::linear" or x.endswith("Backward0")), "")
    backward = inner.endswith("Backward0")
    again = any(x.startswith("autograd::engine") for x in within)
    part = AGAIN if again else FORWARD
    if name in ("aten::mm", "aten::addmm"):
        (m, k), (_, n) = sizes[-2:] if name == "aten::mm" else sizes[1:3]
        work = shapes.dense(m, k, n, backward, part)
        last = (work.product, part) == ("down", AGAIN) and not backward
        return Work(REST) if last else work  # a checkpoint stops short of its last product
    if "aten::addmm" in within:
        return Work(RESIDUAL if name == "aten::copy_" else REST)  # the bias
    for flash in (x for x in within if x.startswith(_FLASH)):
        if flash != name:
            return Work(ATTENTION, CORE, GRADIENT if backward else part)
        rows, heads, length, width = sizes[1]
        product = 2.0 * rows * heads * length**2 * width
        if flash == _FLASH:
            return Work(ATTENTION, CORE, part, 2 * product)
        return Work(ATTENTION, CORE, GRADIENT, 4 * product)
    if NORM in within and (name == WAIT or name.startswith("c10d")):
        return Work(REDUCTION)
    return Work(next((kind for key, kind in _OPERATIONS.items() if key in within), REST))
