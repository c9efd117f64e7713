"""Inputs of matrices: rows as they are, or quantised once for each layout that a matrix wants.

Owns when an op that computes rows and the quantisation of them are one op. Must not know what the
rows mean. All functions return {layout: rows}.
"""


def quantized(ops, work, x, matrices):
    """Rows of x for the matrices; None among them is skipped."""
    inputs = {}
    for matrix in matrices:
        if matrix is None or matrix.layout in inputs:
            continue
        if matrix.layout == "f32":
            inputs["f32"] = x
        else:
            rows = work.quantized(matrix.k, matrix.layout, x.shape[0])
            ops.quantize_rows(rows, x)
            inputs[matrix.layout] = rows
    return inputs


def normed(ops, work, h, x, weight, eps, matrices):
    """Normed rows of x for the matrices; h holds them where one takes floats, else anything."""
    layouts = {matrix.layout for matrix in matrices if matrix is not None}
    wanted = layouts - {"f32"}
    if len(wanted) != 1:  # each way of quantising reads the normed rows
        ops.rms_norm(h, x, weight, eps)
        return quantized(ops, work, h, matrices)
    (layout,) = wanted
    rows, keep = work.quantized(x.shape[1], layout, x.shape[0]), "f32" in layouts
    ops.norm_quantize(rows, h, x, weight, eps, keep)
    return {layout: rows, "f32": h} if keep else {layout: rows}


def activated(ops, work, gate, up, activation, matrix):
    """act(gate) * up for one matrix; gate holds anything afterwards."""
    silu = activation == "silu"
    if matrix.layout == "f32":
        (ops.swiglu if silu else ops.geglu)(gate, gate, up)
        return {"f32": gate}
    rows = work.quantized(matrix.k, matrix.layout, gate.shape[0])
    (ops.swiglu_quantize if silu else ops.geglu_quantize)(rows, gate, gate, up)
    return {matrix.layout: rows}


def gated(ops, work, x, gate, matrix):
    """x * sigmoid(gate) for one matrix; x holds anything afterwards.

    Parameters
    ----------
    x : buffer of shape (M, H * D), float32
    gate : buffer of shape (M, H, D), float32
        Its heads may be apart.
    matrix : PackedMatrix
    """
    if matrix.layout != "f32" and gate.flags.c_contiguous:
        rows = work.quantized(matrix.k, matrix.layout, x.shape[0])
        ops.sigmoid_gate_quantize(rows, x, x, gate.reshape(*x.shape))
        return {matrix.layout: rows}
    d = gate.shape[-1]
    heads = x.reshape(-1, d)
    ops.sigmoid_gate(heads, heads, gate.reshape(-1, d))
    return quantized(ops, work, x, (matrix,))
