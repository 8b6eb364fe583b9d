"""A matrix product by CUDA's driver alone, without a toolkit: prints its time; with `forever`, repeats it."""

import ctypes
import json
import sys
import time

N, TIMES = 2048, 10
KERNEL = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry matmul(.param .u64 A, .param .u64 B, .param .u64 C, .param .u32 N)
{
    .reg .pred %p<3>; .reg .f32 %f<4>; .reg .b32 %r<10>; .reg .b64 %a<12>;
    ld.param.u64 %a1, [A]; ld.param.u64 %a2, [B]; ld.param.u64 %a3, [C]; ld.param.u32 %r1, [N];
    cvta.to.global.u64 %a1, %a1; cvta.to.global.u64 %a2, %a2; cvta.to.global.u64 %a3, %a3;
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r5, %r2, %r3, %r4;
    mov.u32 %r6, %ctaid.y;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.lo.u32 %r7, %r6, %r1;
    mul.wide.u32 %a4, %r7, 4; add.u64 %a5, %a1, %a4;
    mul.wide.u32 %a6, %r5, 4; add.u64 %a7, %a2, %a6;
    mul.wide.u32 %a8, %r1, 4;
    mov.f32 %f1, 0f00000000;
    mov.u32 %r8, 0;
LOOP:
    setp.ge.u32 %p2, %r8, %r1;
    @%p2 bra STORE;
    ld.global.f32 %f2, [%a5]; ld.global.f32 %f3, [%a7]; fma.rn.f32 %f1, %f2, %f3, %f1;
    add.u64 %a5, %a5, 4; add.u64 %a7, %a7, %a8; add.u32 %r8, %r8, 1;
    bra LOOP;
STORE:
    add.u32 %r9, %r7, %r5; mul.wide.u32 %a9, %r9, 4; add.u64 %a10, %a3, %a9; st.global.f32 [%a10], %f1;
DONE:
    ret;
}
"""
cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver."""
    if code := getattr(cuda, name)(*arguments):
        sys.exit(f"{name}: error {code}")


def main() -> None:
    """Multiply a matrix of ones with one of twos."""
    began = time.perf_counter()
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    name = ctypes.create_string_buffer(200)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), KERNEL)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"matmul")
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    matrices = [ctypes.c_uint64() for _ in range(3)]
    for matrix, value in zip(matrices, (0x3F800000, 0x40000000, 0), strict=True):  # 1.0, 2.0
        call("cuMemAlloc_v2", ctypes.byref(matrix), ctypes.c_size_t(4 * N * N))
        call("cuMemsetD32_v2", matrix, ctypes.c_uint(value), ctypes.c_size_t(N * N))
    values = [*matrices, ctypes.c_uint(N)]
    arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))

    def multiply() -> float:
        start = time.perf_counter()
        call("cuLaunchKernel", kernel, N // 256, N, 1, 256, 1, 1, 0, None, arguments, None)
        call("cuCtxSynchronize")
        return time.perf_counter() - start

    multiply()
    first_s = time.perf_counter() - began
    while sys.argv[1:] == ["forever"]:
        print("multiplying", flush=True)
        multiply()
    times = sorted(multiply() for _ in range(TIMES))
    corner = ctypes.c_float()
    call("cuMemcpyDtoH_v2", ctypes.byref(corner), matrices[2], ctypes.c_size_t(4))
    found = {"gpu": name.value.decode(), "gpus": count.value, "right": corner.value == 2 * N}
    print(json.dumps({**found, "first_s": round(first_s, 3), "product_ms": round(times[TIMES // 2] * 1000, 3)}))


if __name__ == "__main__":
    main()
