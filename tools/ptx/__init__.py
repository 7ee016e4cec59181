"""Runs compiled Triton kernels without a GPU, by interpreting their PTX in NumPy.

    with emulated(90):                           # tools.ptx.emulate; 80 is an A100, 90 an H100
        out = batch.attend(TritonBackend(), num_decodes=3)      # on a CPU's tensors
    assert_near_twin(out, batch.expected())

Launchers are called unchanged. Triton compiles each launch just as it would on the GPU,
inspecting the arguments itself, and the resulting PTX is run over the whole grid on the tensors'
memory. A launch raises `machine.Fault` for an access that is out of bounds or not aligned, and
`NotImplementedError` for an unknown opcode. Shared memory is initially NaN, `cp.async` and `wgmma`
complete when they are waited for, and two warps that access the same shared memory without a
barrier between them are a `Fault` too. ``edits={"decode_kernel": change}`` passes a kernel's text
through ``change`` first, to plant a fault that a test must detect.

    python -m tools.ptx            every kernel for both GPUs against its twin, as a table

Not detected: races in global memory, faults of the assembler (ptxas), effects of weak memory
ordering, a missing fence before a wgmma, the last bits of approximations, and time.
"""
