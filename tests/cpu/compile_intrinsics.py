"""Compile the kernels' intrinsics for another CPU, in a process of its own.

    python compile_intrinsics.py REGISTERS TRIPLE CPU

Prints JSON: for each intrinsic the vector multiply-adds in its assembly, the functions that it
calls and the vectors that it moves to the stack. Nothing is run, and numba compiles nothing.
"""

import inspect
import json
import re
import sys

from llvmlite import binding, ir
from numba import types

from labkit.cpu.simd import register_tile_sizes

REGISTERS, TRIPLE, CPU = sys.argv[1:]
register_tile_sizes.HOST_REGISTERS = getattr(register_tile_sizes, REGISTERS)

from labkit.cpu.attention import (  # noqa: E402
    attention_intrinsics,
    attention_params,
    decode_attention_microkernels,
)
from labkit.cpu.matmul import microkernels  # noqa: E402

KINDS = {types.int64: ir.IntType(64), types.int32: ir.IntType(32), types.float32: ir.FloatType()}
X86 = TRIPLE.startswith("x86")
FMA = r"\tvfn?m(?:add|sub)\w+ps\t" if X86 else r"\tfml[as](?:\.4s)?\t"
ON_STACK = r"\tv?mov[au]p[sd]\t%[xyz]mm\d+, -?\d*\(%r[sb]p" if X86 else r"\tst[rp]\tq\d+.*\[sp"


class Context:
    def get_dummy_value(self):
        return ir.Constant(ir.IntType(8).as_pointer(), None)


def lower(intrinsic, params):
    """Return a module with the intrinsic as a function."""
    names = list(inspect.signature(intrinsic._defn).parameters)[1:]
    types_of_arguments = [params if name == "params" else types.int64 for name in names]
    signature, emit = intrinsic._defn(None, *types_of_arguments)
    module = ir.Module("intrinsic")
    module.triple = TRIPLE
    kinds = [KINDS.get(kind, ir.IntType(64)) for kind in signature.args]
    result = KINDS.get(signature.return_type, ir.VoidType())
    function = ir.Function(module, ir.FunctionType(result, kinds), "intrinsic")
    builder = ir.IRBuilder(function.append_basic_block())
    value = emit(Context(), builder, signature, function.args)
    if isinstance(result, ir.VoidType):
        builder.ret_void()
    else:
        builder.ret(value)
    return module


def lookup_module():
    """Return a module with a function that looks up the bytes of a vector in memory."""
    from labkit.cpu.simd import simd_emitter

    module = ir.Module("lookup")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), "lookup")
    builder = ir.IRBuilder(function.append_basic_block())
    code = simd_emitter.Emitter(builder)
    (address,) = function.args
    indices = code.load(address, 0, simd_emitter.I32_VECTOR)
    code.store(code.lookup_bytes(range(16), indices), address)
    builder.ret_void()
    return module


def assembly(module):
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, opt=3)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(parsed, passes)
    return target.emit_assembly(parsed)


def main():
    facts = {}
    for pool_dtype, struct in attention_params.PARAMS_DTYPES.items():
        params = attention_params.params_type(struct)
        for source in (microkernels, decode_attention_microkernels, attention_intrinsics):
            for name, intrinsic in vars(source).items():
                if not hasattr(intrinsic, "_defn"):
                    continue
                if "params" in inspect.signature(intrinsic._defn).parameters:
                    name = f"{name}:{pool_dtype}"
                if name in facts:
                    continue
                text = assembly(lower(intrinsic, params))
                facts[name] = {
                    "fma": len(re.findall(FMA, text)),
                    "calls": sorted(set(re.findall(r"\t(?:callq?|blr?)\t(\S+)", text))),
                    "on_stack": len(re.findall(ON_STACK, text)),
                }
    text = assembly(lookup_module())
    facts["lookup_bytes"] = {
        "calls": re.findall(r"\t(?:callq?|blr?)\t(\S+)", text),
        "mnemonics": re.findall(r"^\t(\w+)", text, re.M),
    }
    print(json.dumps(facts))


main()
