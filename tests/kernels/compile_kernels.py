"""Compiles the Triton kernels of a call for a GPU that is not there, and prints what each launch takes.

    python tests/kernels/compile_kernels.py 80 bf16 8 64 random,random+vanilla 32,64 padded dropped

    python tests/kernels/compile_kernels.py --count 200 random+vanilla

The arguments are the architecture, the type, the number of heads, the width of a head, functions, numbers of tokens,
and kinds of masks: padded (the default), causal, or dropped, which is padded with dropout. Each line that is printed is
a JSON object: registers of a thread, bytes of registers spilled to memory, bytes of shared memory, and the options that
the kernel was compiled with. The attention runs on torch's meta device, where tensors have no values; a stand-in for
Triton's driver says which GPU it is, and a launch is compiled instead.

With --count nothing is compiled: how many kernels so many random shapes would need is printed.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import make_attention  # noqa: E402

from fairseq_synth.computations import kernels  # noqa: E402
from fairseq_synth.masks import causal_mask  # noqa: E402

# {architecture of a GPU: the shared memory that a program may take, in bytes}
SHARED_MEMORY_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Driver(DriverBase):
    """Stands in for the driver of a GPU of an architecture, on which nothing runs."""

    def __init__(self, architecture):
        self.architecture = architecture

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def set_current_device(self, device):
        pass

    def get_device_capability(self, device=None):
        return divmod(self.architecture, 10)


def measure_resources(compiled):
    """Returns what a compiled kernel takes, as the disassembler that comes with Triton says.

    The keys are "registers", of a thread, "spilled", the bytes of registers spilled to memory, and "shared", the bytes
    of shared memory.
    """
    disassembler = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [disassembler, "--dump-resource-usage", file.name]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    registers = re.search(r"REG:(\d+) STACK:\d+", process.stdout)[1]
    stack = re.search(r"REG:\d+ STACK:(\d+)", process.stdout)[1]
    local = re.search(r"LOCAL:(\d+)", process.stdout)[1]
    return {"registers": int(registers), "spilled": int(stack) + int(local), "shared": compiled.metadata.shared}


def compile_call(architecture, spec, dtype, heads, width, length, masks="padded", bsz=64, max_length=16):
    """Compiles the launches of a layer, forward and backward, and returns a dict for each of them.

    The dict has the name of the kernel, the options that it was compiled with, and what `measure_resources` returns.

    Args:
        architecture: the architecture of the GPU, a key of `SHARED_MEMORY_LIMITS`.
        spec: the functions of the layer.
        dtype: the type of all tensors.
        heads: the number of heads.
        width: the width of a head.
        length: the number of tokens of a sentence.
        masks: padded, causal, or dropped, which is padded with dropout.
        bsz: the number of sentences.
        max_length: the longest sentence of the layer, if `length` is not longer.
    """
    launches = []
    resources_of_loaded_kernels = []

    def init_handles(compiled):
        """Takes the place of a GPU, which says how much is spilled when it loads a kernel, and refuses a large one."""
        resources = measure_resources(compiled)
        resources_of_loaded_kernels.append(resources)
        compiled.n_spills = resources["spilled"] // 4  # a register has 4 bytes
        if resources["shared"] > SHARED_MEMORY_LIMITS[architecture]:
            raise OutOfResources(resources["shared"], SHARED_MEMORY_LIMITS[architecture], "shared memory")

    def compile_launch(launch, tensors):
        """Takes the place of `kernels.run`."""
        launch.compile(launch.args(tensors))
        resources = {}
        if resources_of_loaded_kernels:  # `count_kernels` loads none
            resources = resources_of_loaded_kernels[-1]
        module_name = launch.kernel.__module__.rsplit("_")[-1]
        launches.append({"kernel": f"{module_name}.{launch.kernel.__name__}", **launch.options, **resources})

    def load_without_comparison(plan, _call):
        """Takes the place of `kernels.load`, which compares the kernels with the definition."""
        plan.is_loaded = True
        return True

    dropout = 0.1 if masks == "dropped" else 0.0
    module = make_attention(spec, "convex", heads * width, heads, max(length, max_length), 8, dropout=dropout)
    module = module.to("meta", dtype).train()
    x = torch.empty(length, bsz, heads * width, device="meta", dtype=dtype, requires_grad=True)
    if masks == "causal":
        padding = None
        attn_mask = causal_mask(x)
    else:
        padding = torch.empty(bsz, length, device="meta", dtype=torch.bool)
        attn_mask = None
    kernels.find_plan.cache_clear()
    with (
        mock.patch.object(kernels, "device_fits", lambda *_: True),
        mock.patch.object(kernels, "run", compile_launch),
        mock.patch.object(kernels, "load", load_without_comparison),
        mock.patch.object(CompiledKernel, "_init_handles", init_handles),
    ):
        out, _ = module(x, x, x, key_padding_mask=padding, attn_mask=attn_mask)
        out.backward(torch.empty_like(out))
    return launches


def count_kernels(number_of_shapes, spec):
    """Returns how many kernels a layer needs for batches of random numbers of sentences and tokens, with padding.

    Triton's compiler, which is asked for each kernel that it has not compiled yet, is replaced: it only counts.
    """
    generator = random.Random(0)
    kernels_to_compile = set()

    def record_kernel(kernel, key, *_):
        """Takes the place of Triton's compiler, and returns a compiled kernel that spills no registers.

        `key` is the text by which Triton tells apart the types and constants that a kernel is compiled for. The number
        of spills is read by `launches.Launch`, which would compile a kernel again that spills many.
        """
        kernels_to_compile.add((kernel, key))
        return mock.MagicMock(n_spills=0)

    with mock.patch.object(triton.JITFunction, "_do_compile", record_kernel):
        for _ in range(number_of_shapes):
            bsz = generator.randint(1, 600)
            length = generator.randint(1, 300)
            compile_call(
                architecture=90,  # that of an H100
                spec=spec,
                dtype=torch.bfloat16,
                heads=8,
                width=64,
                length=length,
                bsz=bsz,
                max_length=300,
            )
    return len(kernels_to_compile)


def compile_calls(architecture, dtype, heads, width, specs, lengths, kinds_of_masks):
    """Compiles the launches of all combinations of functions, lengths and masks, and prints a line for each launch."""
    for spec in specs:
        for length in lengths:
            for masks in kinds_of_masks:
                call = dict(spec=spec, dtype=dtype, heads=heads, width=width, length=length, masks=masks)
                launches = compile_call(architecture, spec, DTYPES[dtype], heads, width, length, masks)
                for launch in launches:
                    print(json.dumps({**call, **launch}), flush=True)


def main():
    """Reads the arguments of the command, and counts or compiles kernels."""
    kernels.SWITCH = "1"
    if sys.argv[1] == "--count":
        _program, _option, number_of_shapes, spec = sys.argv
        triton.runtime.driver.set_active(Driver(90))
        print(count_kernels(int(number_of_shapes), spec))
        return
    _program, architecture, dtype, heads, width, specs, lengths, *kinds_of_masks = sys.argv
    if not kinds_of_masks:
        kinds_of_masks = ["padded"]
    triton.runtime.driver.set_active(Driver(int(architecture)))
    compile_calls(
        int(architecture),
        dtype,
        int(heads),
        int(width),
        specs.split(","),
        [int(length) for length in lengths.split(",")],
        kinds_of_masks,
    )


if __name__ == "__main__":
    main()
