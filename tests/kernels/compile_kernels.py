"""Compiles the Triton kernels of a call for a GPU that is not there, and prints what each launch takes.

    python tests/kernels/compile_kernels.py 80 bf16 8 64 random,random+vanilla 32,64 padded dropped

    python tests/kernels/compile_kernels.py --count 200 random+vanilla

Architecture, type, heads, width of a head, functions, tokens, and masks: padded (the default), causal, or dropped,
which is padded with dropout. Each line is a JSON object: registers of a thread, bytes of registers spilled to memory,
bytes of shared memory, and the options that the kernel was compiled with. The attention runs on torch's meta device,
where tensors have no values; a stand-in for Triton's driver says which GPU it is, and a launch is compiled instead.
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

LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # shared memory of a program, in bytes
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Driver(DriverBase):
    """A GPU of an architecture, on which nothing runs."""

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


def resources(compiled):
    """What a compiled kernel takes, by the disassembler that comes with Triton."""
    program = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        found = subprocess.run(
            [program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found.stdout).groups()
    local = re.search(r"LOCAL:(\d+)", found.stdout)[1]
    return {"registers": int(registers), "spilled": int(stack) + int(local), "shared": compiled.metadata.shared}


def compile_call(architecture, spec, dtype, heads, width, length, masks="padded", bsz=64, max_length=16):
    """The launches of a layer, forward and backward, compiled."""
    found, taken = [], [{}]

    def init_handles(compiled):
        """In the place of a GPU, which says how much is spilled when it loads a kernel, and refuses a large one."""
        taken.append(resources(compiled))
        compiled.n_spills = taken[-1]["spilled"] // 4
        if taken[-1]["shared"] > LIMITS[architecture]:
            raise OutOfResources(taken[-1]["shared"], LIMITS[architecture], "shared memory")

    def run(launch, tensors):
        launch.compile(launch.args(tensors))
        name = f"{launch.kernel.__module__.rsplit('_')[-1]}.{launch.kernel.__name__}"
        found.append({"kernel": name, **launch.options, **taken[-1]})

    def load(plan, _):
        plan.is_loaded = True
        return True

    dropout = 0.1 if masks == "dropped" else 0.0
    module = make_attention(spec, "convex", heads * width, heads, max(length, max_length), 8, dropout=dropout)
    module = module.to("meta", dtype).train()
    x = torch.empty(length, bsz, heads * width, device="meta", dtype=dtype, requires_grad=True)
    mask = None if masks == "causal" else torch.empty(bsz, length, device="meta", dtype=torch.bool)
    attn_mask = causal_mask(x) if masks == "causal" else None
    gpu = dict(device_fits=lambda *_: True, run=run, load=load)
    kernels.find_plan.cache_clear()
    loading = mock.patch.object(CompiledKernel, "_init_handles", init_handles)
    with mock.patch.multiple(kernels, **gpu), loading:
        out, _ = module(x, x, x, key_padding_mask=mask, attn_mask=attn_mask)
        out.backward(torch.empty_like(out))
    return found


def count(number, spec):
    """How many kernels a layer needs for batches of random numbers of sentences and tokens, with padding."""
    generator = random.Random(0)
    found = set()

    def compiled(kernel, key, *_):
        found.add((kernel, key))
        return mock.MagicMock(n_spills=0)

    with mock.patch.object(triton.JITFunction, "_do_compile", compiled):
        for _ in range(number):
            shape = dict(bsz=generator.randint(1, 600), length=generator.randint(1, 300))
            compile_call(90, spec, torch.bfloat16, 8, 64, **shape, max_length=300)
    return len(found)


def main():
    if sys.argv[1] == "--count":
        kernels.SWITCH = "1"
        triton.runtime.driver.set_active(Driver(90))
        print(count(int(sys.argv[2]), sys.argv[3]))
        return
    architecture, dtype, heads, width, specs, lengths = sys.argv[1:7]
    kernels.SWITCH = "1"
    triton.runtime.driver.set_active(Driver(int(architecture)))
    for spec in specs.split(","):
        for length in lengths.split(","):
            for masks in sys.argv[7:] or ["padded"]:
                call = dict(spec=spec, dtype=dtype, heads=int(heads), width=int(width), length=int(length), masks=masks)
                for launch in compile_call(int(architecture), **{**call, "dtype": DTYPES[dtype]}):
                    print(json.dumps({**call, **launch}), flush=True)


if __name__ == "__main__":
    main()
