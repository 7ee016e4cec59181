"""Compiled Triton kernels without a GPU: their PTX, run in NumPy.

    with emulated(90):                           # tools.ptx.emulate; 80 is an A100, 90 an H100
        out = batch.attend(TritonBackend(), num_decodes=3)      # on a CPU's tensors
    assert_near_twin(out, batch.expected())

Launchers are called as they are. Triton compiles each launch just as it would on the GPU, from
its own look at the arguments, and the PTX that comes out is run over the whole grid on the
tensors' memory. A launch raises `machine.Fault` for an access out of bounds or not aligned, and
`NotImplementedError` for an opcode that is not known; shared memory begins as NaN,
`cp.async` and `wgmma` deliver when they are waited for, and two warps that meet at a place of
shared memory without a barrier between them are a `Fault` too. ``edits={"decode_kernel": change}``
gives a kernel's text to ``change`` first, to plant a fault that a test must notice.

    python -m tools.ptx            every kernel for both GPUs against its twin, as a table

Not shown: races in global memory, faults of the assembler (ptxas), weak memory, a fence that is
missing before a wgmma, the last bits of approximations, and time.
"""
