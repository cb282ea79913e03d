"""Kernels of products and tensor cores, by names as profilers show them on Volta to Blackwell."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.lab.inspection.inspect import kernel_rows, work_of
from halfstep.measurements import KernelRow

PRODUCT, CONVOLUTION, ATTENTION = "matrix product", "convolution", "attention"

ON_TENSOR_CORES = {
    "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn": PRODUCT,
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn": PRODUCT,
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn": PRODUCT,
    "ampere_bf16_s1688gemm_bf16_128x64_sliced1x2_ldg8_f2f_tn": PRODUCT,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>("
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8::Params)": PRODUCT,
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_nn_align8": PRODUCT,
    "cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4": PRODUCT,  # TF32
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_"
    "kernel__5x_cublas": PRODUCT,
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": PRODUCT,
    "nvjet_sm121_tst_mma_128x176x64_2_32x88x64_tmaAB_bz_TNNN": PRODUCT,
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_"
    "tensor16x8x8_alignc4_execute_kernel__5x_cudnn": CONVOLUTION,
    "sm86_xmma_fprop_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage3_warpsize1x4x1_g8_"
    "tensor16x8x16_execute_kernel__5x_cudnn": CONVOLUTION,
    "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_64x64_16x10_nhwc_align4>": CONVOLUTION,
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128,128,128,4>>": ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<"
    "pytorch_flash::Flash_bwd_kernel_traits<64, 128>>": ATTENTION,
    "flash_fwd_splitkv_kernel": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": ATTENTION,
    "fmha_cutlassF_f16_aligned_64x64_rf_sm75": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm120_flash_fprop_f16_knob_3_64x64x128_4x1x1_cga1x1x1": ATTENTION,
}  # fmt: skip
ELSEWHERE = {
    "ampere_sgemm_128x64_tn": PRODUCT,
    "volta_sgemm_128x64_nn": PRODUCT,
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>("
    "cutlass_80_simt_sgemm_64x64_8x5_tn_align1::Params)": PRODUCT,
    "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4>": PRODUCT,
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>": PRODUCT,
    "void magma_sgemmEx_kernel<float, float>(int, int)": PRODUCT,
    "ampere_scudnn_128x64_relu_xregs_large_nn_v1": CONVOLUTION,
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x16x8_stage3_warpsize4x1x1_g1_ffma_"
    "aligna4_alignc4": CONVOLUTION,
    "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1>": CONVOLUTION,
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>": CONVOLUTION,
    "fmha_cutlassF_f32_aligned_64x64_rf_sm75": ATTENTION,
}  # fmt: skip
NO_PRODUCT = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, (bool)0, (bool)1>",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, __nv_bfloat16>",
    "void flash_fwd_splitkv_combine_kernel<pytorch_flash::Flash_fwd_kernel_traits<128>>",
    "triton_red_fused_cat_native_layer_norm_native_layer_norm_backward_8",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL128",
    "Memcpy DtoD (Device -> Device)",
]


def test_a_kernels_name_says_what_it_computes_and_whether_on_tensor_cores():
    assert {name: work_of(name) for name in ON_TENSOR_CORES} == {n: (w, True) for n, w in ON_TENSOR_CORES.items()}
    assert {name: work_of(name) for name in ELSEWHERE} == {n: (w, False) for n, w in ELSEWHERE.items()}
    assert [name for name in NO_PRODUCT if work_of(name) is not None] == []


def test_kernels_of_a_name_are_one_row_and_the_longest_comes_first():
    ran = [
        ("ampere_sgemm_128x64_tn", 1.0),
        ("nvjet_tst_128x256", 2.0),
        (NO_PRODUCT[0], 9.0),
        ("nvjet_tst_128x256", 3.0),
    ]
    assert kernel_rows(ran) == (
        KernelRow("nvjet_tst_128x256", PRODUCT, True, 2, 5.0),
        KernelRow("ampere_sgemm_128x64_tn", PRODUCT, False, 1, 1.0),
    )


@pytest.mark.gpu
@pytest.mark.silicon
def test_on_cuda_low_products_run_on_tensor_cores_and_fp32_ones_do_not():
    model, x = nn.Linear(1024, 1024).cuda(), torch.randn(256, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for level, expected in (("O1", {True}), ("O0", {False})):
        with halfstep.initialize(model, optimizer, level, low="bf16") as session:
            found = halfstep.inspect(session, lambda: model(x).square().mean())
        assert {row.tensor_cores for row in found.kernels if row.work == PRODUCT} == expected
