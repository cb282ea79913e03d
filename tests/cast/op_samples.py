"""One call of every overload in the op table, for tests: `SAMPLES[name](op, t)`, where `t` makes the float tensors."""

import torch

from halfstep.train.cast.opregistry import find_overload

SQUARE = torch.eye(3) + 0.1 * torch.arange(9.0).reshape(3, 3)
SPD = torch.tensor([[2.0, 0.5, 0.25], [0.5, 3.0, 0.75], [0.25, 0.75, 4.0]])
IMAGE = (1, 2, 4, 4)
CLASSES = torch.tensor([1, 0, 3])
ROW = torch.tensor([0, 1])


def _unary(*names):
    return dict.fromkeys(names, lambda o, t: o(t(3, 4)))


def _pair(*names):
    return dict.fromkeys(names, lambda o, t: o(t(3, 4), t(3, 4)))


def _square(*names):
    return dict.fromkeys(names, lambda o, t: o(t(SQUARE)))


def _spd(*names):
    return dict.fromkeys(names, lambda o, t: o(t(SPD)))


def _cell(gates):
    return lambda o, t: o(t(2, 3), t(2, 4), t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates))


def _rnn(gates, states, packed):
    def call(o, t):
        params = [t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates)]
        hidden = t(1, 2, 4) if states == 1 else [t(1, 2, 4) for _ in range(states)]
        if packed:
            return o(t(3, 3), torch.tensor([2, 1]), hidden, params, True, 1, 0.0, True, False)
        return o(t(5, 2, 3), hidden, params, True, 1, 0.0, True, False, False)

    return call


ALLOW = {
    "conv1d": lambda o, t: o(t(1, 2, 6), t(3, 2, 3), t(3)),
    "conv1d.padding": lambda o, t: o(t(1, 2, 6), t(3, 2, 3), t(3), [1], "same"),
    "conv2d": lambda o, t: o(t(*IMAGE), t(3, 2, 3, 3), t(3)),
    "conv2d.padding": lambda o, t: o(t(*IMAGE), t(3, 2, 3, 3), t(3), [1, 1], "valid"),
    "conv3d": lambda o, t: o(t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2), t(3)),
    "conv3d.padding": lambda o, t: o(t(1, 2, 4, 4, 4), t(3, 2, 2, 2, 2), t(3), [1, 1, 1], "valid"),
    "conv_tbc": lambda o, t: o(t(4, 2, 6), t(2, 6, 3), t(3)),
    "conv_transpose1d": lambda o, t: o(t(1, 2, 6), t(2, 3, 3), t(3)),
    "conv_transpose2d.input": lambda o, t: o(t(*IMAGE), t(2, 3, 3, 3), t(3)),
    "conv_transpose3d.input": lambda o, t: o(t(1, 2, 3, 3, 3), t(2, 3, 2, 2, 2), t(3)),
    "convolution": lambda o, t: o(t(*IMAGE), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "_convolution": lambda o, t: o(
        t(*IMAGE), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    ),
    "_convolution.deprecated": lambda o, t: o(
        t(*IMAGE), t(3, 2, 3, 3), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True
    ),
    "linear": lambda o, t: o(t(2, 3), t(4, 3), t(4)),
    "matmul": lambda o, t: o(t(2, 3, 4), t(4, 5)),
    "mm": lambda o, t: o(t(3, 4), t(4, 5)),
    "bmm": lambda o, t: o(t(2, 3, 4), t(2, 4, 5)),
    "mv": lambda o, t: o(t(3, 4), t(4)),
    "addmm": lambda o, t: o(t(3, 5), t(3, 4), t(4, 5)),
    "addmv": lambda o, t: o(t(3), t(3, 4), t(4)),
    "addr": lambda o, t: o(t(3, 4), t(3), t(4)),
    "addbmm": lambda o, t: o(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "baddbmm": lambda o, t: o(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "einsum": lambda o, t: o("bij,bjk->bik", [t(2, 3, 4), t(2, 4, 5)]),
    "chain_matmul": lambda o, t: o([t(2, 3), t(3, 4), t(4, 2)]),
    "linalg_multi_dot": lambda o, t: o([t(2, 3), t(3, 4), t(4, 2)]),
    "linalg_vecdot": lambda o, t: o(t(3, 4), t(3, 4)),
    "_addmm_activation": lambda o, t: o(t(5).detach(), t(3, 4).detach(), t(4, 5).detach()),
    "scaled_dot_product_attention": lambda o, t: o(t(1, 2, 3, 4), t(1, 2, 5, 4), t(1, 2, 5, 4)),
    "lstm_cell": lambda o, t: o(t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": _cell(3),
    "rnn_tanh_cell": _cell(1),
    "rnn_relu_cell": _cell(1),
    "lstm.input": _rnn(4, 2, False),
    "lstm.data": _rnn(4, 2, True),
    "gru.input": _rnn(3, 1, False),
    "gru.data": _rnn(3, 1, True),
    "rnn_tanh.input": _rnn(1, 1, False),
    "rnn_tanh.data": _rnn(1, 1, True),
    "rnn_relu.input": _rnn(1, 1, False),
    "rnn_relu.data": _rnn(1, 1, True),
    "prelu": lambda o, t: o(t(torch.tensor([[-0.5, 0.25, -1.0], [0.5, 1.0, -0.75]])), t(3)),
}

DENY = {
    **_unary("exp", "expm1", "cosh", "sinh", "softplus", "log", "log10", "log1p", "log2", "tan", "reciprocal", "rsqrt"),
    **dict.fromkeys(("acos", "asin", "erfinv"), lambda o, t: o(t(torch.tensor([0.1, 0.4, 0.7])))),
    "pow.Tensor_Scalar": lambda o, t: o(t(3, 4), 3),
    "pow.Tensor_Tensor": lambda o, t: o(t(3, 4), t(3, 4)),
    "pow.Scalar": lambda o, t: o(2.0, t(3, 4)),
    "softmax.int": lambda o, t: o(t(3, 4), -1),
    "log_softmax.int": lambda o, t: o(t(3, 4), -1),
    "logsumexp": lambda o, t: o(t(3, 4), [1]),
    **_unary("sum", "prod", "linalg_vector_norm", "norm.Scalar", "nuclear_norm", "pdist"),
    "sum.dim_IntList": lambda o, t: o(t(3, 4), [1]),
    "prod.dim_int": lambda o, t: o(t(3, 4), 1),
    "cumsum": lambda o, t: o(t(3, 4), 1),
    "cumprod": lambda o, t: o(t(3, 4), 1),
    "norm.ScalarOpt_dim": lambda o, t: o(t(3, 4), 2, [1]),
    "linalg_matrix_norm": lambda o, t: o(t(SQUARE), 2),
    "linalg_matrix_norm.str_ord": lambda o, t: o(t(SQUARE), "nuc"),
    "frobenius_norm.dim": lambda o, t: o(t(3, 4), [0, 1]),
    "nuclear_norm.dim": lambda o, t: o(t(3, 4), [0, 1]),
    "renorm": lambda o, t: o(t(3, 4), 2, 0, 0.5),
    "layer_norm": lambda o, t: o(t(3, 4), [4], t(4), t(4)),
    "native_layer_norm": lambda o, t: o(t(3, 4), [4], t(4), t(4), 1e-5),
    "group_norm": lambda o, t: o(t(*IMAGE), 2, t(2), t(2)),
    "rms_norm": lambda o, t: o(t(3, 4), [4], t(4)),
    **_pair("dist", "cosine_similarity", "cdist"),
    "nll_loss": lambda o, t: o(t(3, 4), CLASSES, t(4).detach()),
    "nll_loss2d": lambda o, t: o(t(1, 4, 1, 3), CLASSES.view(1, 1, 3), t(4).detach()),
    "cross_entropy_loss": lambda o, t: o(t(3, 4), CLASSES, t(4).detach()),
    **_pair("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits"),
    "poisson_nll_loss": lambda o, t: o(t(3, 4), t(3, 4), True, False, 1e-8, 1),
    **dict.fromkeys(
        ("soft_margin_loss", "hinge_embedding_loss"), lambda o, t: o(t(3, 4), torch.ones(3, 4, dtype=t.dtype))
    ),
    "margin_ranking_loss": lambda o, t: o(t(3), t(3), torch.ones(3, dtype=t.dtype), 0.5),
    "multi_margin_loss": lambda o, t: o(t(3, 4), CLASSES),
    "multilabel_margin_loss": lambda o, t: o(t(1, 4), torch.tensor([[1, 3, -1, 0]])),
    "multilabel_margin_loss_forward": lambda o, t: o(t(1, 4), torch.tensor([[1, 3, -1, 0]]), 1),
    "cosine_embedding_loss": lambda o, t: o(t(3, 4), t(3, 4), torch.ones(3, dtype=torch.int64)),
    "triplet_margin_loss": lambda o, t: o(t(3, 4), t(3, 4), t(3, 4)),
    **dict.fromkeys(("upsample_nearest1d", "_upsample_nearest_exact1d"), lambda o, t: o(t(1, 2, 4), [7])),
    **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), lambda o, t: o(t(*IMAGE), [7, 7])),
    **dict.fromkeys(("upsample_nearest3d", "_upsample_nearest_exact3d"), lambda o, t: o(t(1, 1, 2, 2, 2), [3, 3, 3])),
    "upsample_linear1d": lambda o, t: o(t(1, 2, 4), [7], False),
    **dict.fromkeys(
        ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        lambda o, t: o(t(*IMAGE), [7, 7], False),
    ),
    "upsample_trilinear3d": lambda o, t: o(t(1, 1, 2, 2, 2), [3, 3, 3], False),
    **dict.fromkeys(("upsample_nearest1d.vec", "_upsample_nearest_exact1d.vec"), lambda o, t: o(t(1, 2, 4), [7], None)),
    **dict.fromkeys(
        ("upsample_nearest2d.vec", "_upsample_nearest_exact2d.vec"), lambda o, t: o(t(*IMAGE), [7, 7], None)
    ),
    **dict.fromkeys(
        ("upsample_nearest3d.vec", "_upsample_nearest_exact3d.vec"), lambda o, t: o(t(1, 1, 2, 2, 2), None, [1.5] * 3)
    ),
    "upsample_linear1d.vec": lambda o, t: o(t(1, 2, 4), [7], False, None),
    **dict.fromkeys(
        (
            "upsample_bilinear2d.vec",
            "upsample_bicubic2d.vec",
            "_upsample_bilinear2d_aa.vec",
            "_upsample_bicubic2d_aa.vec",
        ),
        lambda o, t: o(t(*IMAGE), [7, 7], False, None),
    ),
    "upsample_trilinear3d.vec": lambda o, t: o(t(1, 1, 2, 2, 2), [3, 3, 3], False, None),
    **_unary("fft_fft", "fft_fft2", "fft_fftn", "fft_ifft", "fft_ifft2", "fft_ifftn", "fft_rfft", "fft_rfft2"),
    **_unary("fft_rfftn", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_ihfft", "fft_hfft2", "fft_hfftn"),
    **_unary("fft_ihfft2", "fft_ihfftn"),
    "stft": lambda o, t: o(t(16), 8, return_complex=True),
    "stft.center": lambda o, t: o(t(16), 8, return_complex=True),
    "polar": lambda o, t: o(t(3), t(3)),
    "complex": lambda o, t: o(t(3), t(3)),
    "view_as_complex": lambda o, t: o(t(3, 2)),
    **_spd("linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh", "linalg_eigvalsh", "linalg_matrix_sqrth"),
    **_spd("cholesky", "cholesky_inverse"),
    "logdet": lambda o, t: o(t(SPD)),
    **dict.fromkeys(("linalg_ldl_factor", "linalg_ldl_factor_ex", "geqrf"), lambda o, t: o(t(SPD).detach())),
    **_square("linalg_cond", "linalg_eig", "linalg_eigvals", "linalg_inv", "linalg_inv_ex", "linalg_qr", "inverse"),
    **_square("linalg_svd", "linalg_svdvals", "pinverse", "qr", "svd", "_lu_with_info", "linalg_det", "linalg_slogdet"),
    **_square("det", "slogdet", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex"),
    **_square("matrix_exp", "linalg_matrix_exp"),
    **_square("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.atol_rtol_float"),
    **_square("linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor"),
    "linalg_pinv": lambda o, t: o(t(SQUARE), 1e-6),
    "linalg_cond.p_str": lambda o, t: o(t(SQUARE).detach(), "fro"),
    **dict.fromkeys(("linalg_householder_product", "orgqr"), lambda o, t: o(t(SQUARE), t(3))),
    "linalg_lstsq": lambda o, t: o(t(SQUARE), t(3, 2)),
    "linalg_matrix_rank": lambda o, t: o(t(SQUARE), 0.1),
    "linalg_matrix_rank.tol_tensor": lambda o, t: o(t(SQUARE), t(torch.tensor(0.1))),
    "linalg_pinv.rcond_tensor": lambda o, t: o(t(SQUARE), t(torch.tensor(0.1)).detach()),
    **dict.fromkeys(("linalg_solve", "linalg_solve_ex"), lambda o, t: o(t(SQUARE), t(3, 2))),
    "linalg_solve_triangular": lambda o, t: o(t(SQUARE), t(3, 2), upper=True),
    "linalg_tensorinv": lambda o, t: o(t(SQUARE), 1),
    "linalg_tensorsolve": lambda o, t: o(t(SQUARE), t(3)),
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), lambda o, t: o(t(SQUARE), 3)),
    "linalg_lu_solve": lambda o, t: o(t(SQUARE), torch.tensor([1, 2, 3], dtype=torch.int32), t(3, 2)),
    "lu_solve": lambda o, t: o(t(3, 2), t(SQUARE), torch.tensor([1, 2, 3], dtype=torch.int32)),
    "linalg_ldl_solve": lambda o, t: o(t(SPD).detach(), torch.tensor([1, 2, 3], dtype=torch.int32), t(3, 2).detach()),
    "cholesky_solve": lambda o, t: o(t(3, 2), t(SPD)),
    "ormqr": lambda o, t: o(t(SQUARE), t(3), t(3, 2)),
    "triangular_solve": lambda o, t: o(t(3, 2), t(SQUARE)),
    **dict.fromkeys(("quantile.scalar", "nanquantile.scalar"), lambda o, t: o(t(3, 4), 0.3)),
    **dict.fromkeys(("quantile", "nanquantile"), lambda o, t: o(t(3, 4), t(torch.tensor([0.3])))),
    "ctc_loss.IntList": lambda o, t: o(t(6, 1, 4), torch.tensor([[1, 2]]), [6], [2]),
    "ctc_loss.Tensor": lambda o, t: o(t(6, 1, 4), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])),
    "avg_pool3d": lambda o, t: o(t(1, 1, 4, 4, 4), [2, 2, 2]),
}

DENY = {name: sample for name, sample in DENY.items() if find_overload(name)}  # 2.14 has a new one, 2.15 two less

# `t` makes tensors of the dtypes that a test asks for in turn, so that these meet two formats
PROMOTE = {
    "isclose": lambda o, t: o(t(3, 4), t(3, 4)),
    "_sparse_mm": lambda o, t: o(t(3, 3).to_sparse(), t(3, 4)),
    "_weight_norm": lambda o, t: o(t(3, 4), t(3, 1)),
    **dict.fromkeys(("addcdiv", "addcmul"), lambda o, t: o(t(3, 4), t(3, 4), t(3, 4))),
    **_pair("atan2"),
    "heaviside": lambda o, t: o(t(3).detach(), t(3).detach()),
    **dict.fromkeys(("dot", "vdot", "inner"), lambda o, t: o(t(3), t(3))),
    "bilinear": lambda o, t: o(t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    **dict.fromkeys(("cross", "linalg_cross"), lambda o, t: o(t(2, 3), t(2, 3))),
    "tensordot": lambda o, t: o(t(3, 4), t(4, 5), [1], [0]),
    "grid_sampler": lambda o, t: o(t(*IMAGE), t(1, 2, 2, 2), 0, 0, False),
    "index_put": lambda o, t: o(t(3, 4), [ROW], t(2, 4)),
    **dict.fromkeys(("index_copy", "index_add"), lambda o, t: o(t(3, 4), 0, ROW, t(2, 4))),
    "index_reduce": lambda o, t: o(t(3, 4), 0, ROW, t(2, 4), "mean"),
    **dict.fromkeys(("scatter_add", "scatter.src"), lambda o, t: o(t(3, 4), 0, ROW.view(1, 2), t(1, 2))),
    "scatter.reduce": lambda o, t: o(t(3, 4).detach(), 0, ROW.view(1, 2), t(1, 2).detach(), reduce="add"),
    "scatter_reduce.two": lambda o, t: o(t(3, 4), 0, ROW.view(1, 2), t(1, 2), "sum"),
    "masked_scatter": lambda o, t: o(t(3), torch.tensor([True, False, True]), t(3)),
    "put": lambda o, t: o(t(3, 4), ROW, t(2)),
    "lerp.Scalar": lambda o, t: o(t(3), t(3), 0.25),
    "lerp.Tensor": lambda o, t: o(t(3), t(3), t(3)),
    **dict.fromkeys(("meshgrid", "meshgrid.indexing"), lambda o, t: o([t(3), t(4)])),
    "embedding_bag": lambda o, t: o(t(3, 4), ROW, torch.tensor([0]), False, 0, False, t(2)),
    "embedding_bag.padding_idx": lambda o, t: o(t(3, 4), ROW, torch.tensor([0]), False, 0, False, t(2), False, None),
    "searchsorted.Tensor": lambda o, t: o(t(torch.tensor([0.1, 0.5, 0.9])), t(3)),
    "bucketize.Tensor": lambda o, t: o(t(3), t(torch.tensor([0.1, 0.5, 0.9]))),
}
PROMOTE["meshgrid.indexing"] = lambda o, t: o([t(3), t(4)], indexing="ij")

# written in place: the first tensor is no leaf and keeps its dtype
IN_PLACE = {
    "index_put_": lambda o, t: o(t(3, 4).clone(), [ROW], t(2, 4)),
    **dict.fromkeys(("index_copy_", "index_add_"), lambda o, t: o(t(3, 4).clone(), 0, ROW, t(2, 4))),
    "index_reduce_": lambda o, t: o(t(3, 4).clone(), 0, ROW, t(2, 4), "mean"),
    **dict.fromkeys(("scatter_add_", "scatter_.src"), lambda o, t: o(t(3, 4).clone(), 0, ROW.view(1, 2), t(1, 2))),
    "scatter_.reduce": lambda o, t: o(t(3, 4).detach().clone(), 0, ROW.view(1, 2), t(1, 2).detach(), reduce="add"),
    "scatter_reduce_.two": lambda o, t: o(t(3, 4).clone(), 0, ROW.view(1, 2), t(1, 2), "sum"),
    "masked_scatter_": lambda o, t: o(t(3).clone(), torch.tensor([True, False, True]), t(3)),
    "put_": lambda o, t: o(t(3, 4).clone(), ROW, t(2)),
}

INFER = {
    "batch_norm": lambda o, t: o(t(3, 4), t(4), t(4), None, None, True, 0.1, 1e-5, False),
    "instance_norm": lambda o, t: o(t(*IMAGE), t(2), t(2), None, None, True, 0.1, 1e-5, False),
}

# CUDA's, or parts of other ops that no code calls by themselves
UNREACHABLE = {
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention",
    "_native_multi_head_attention",
}
