"""Compile the kernels' intrinsics for another CPU, in a process of its own.

    python compile_intrinsics.py REGISTERS TRIPLE CPU [FEATURES]

Prints JSON. Without FEATURES: for each intrinsic the vector multiply-adds in its assembly, the
functions that it calls and the vectors that it moves to the stack. With FEATURES: for each
intrinsic of the products of int8 activations and each number of bits, the number of each
instruction in its assembly. Nothing is run, and numba compiles nothing.
"""

import inspect
import json
import re
import sys
from collections import Counter

from llvmlite import binding, ir
from numba import types

from labkit.cpu.simd import register_tile_sizes

REGISTERS, TRIPLE, CPU, *FEATURES = sys.argv[1:]
register_tile_sizes.HOST_REGISTERS = getattr(register_tile_sizes, REGISTERS)

from labkit.cpu.matmul import int8_dot  # noqa: E402

if FEATURES:
    int8_dot.host_form = lambda bits: int8_dot.form_of(bits, TRIPLE, CPU, *FEATURES)

from labkit.cpu.attention import (  # noqa: E402
    attention_intrinsics,
    attention_params,
    decode_attention_microkernels,
)
from labkit.cpu.matmul import int8_microkernels, microkernels  # noqa: E402
from labkit.cpu.simd import simd_emitter  # noqa: E402

I64, VOID = ir.IntType(64), ir.VoidType()
KINDS = {types.int64: I64, types.int32: ir.IntType(32), types.float32: ir.FloatType()}
X86 = TRIPLE.startswith("x86")
FMA = r"\tvfn?m(?:add|sub)\w+ps\t" if X86 else r"\tfml[as](?:\.4s)?\t"
ON_STACK = r"\tv?mov[au]p[sd]\t%[xyz]mm\d+, -?\d*\(%r[sb]p" if X86 else r"\tst[rp]\tq\d+.*\[sp"
CALLS = {
    "quantize_row": int8_microkernels.QuantizeCall,
    "multiply_row": int8_microkernels.RowCall,
    "unpack_panel": int8_microkernels.UnpackCall,
    "multiply_tile": int8_microkernels.Int8TileCall,
}


class Context:
    def get_dummy_value(self):
        return ir.Constant(ir.IntType(8).as_pointer(), None)


def assembly(kinds, emit, result=VOID):
    """Compile a function of these types, whose code ``emit(builder, arguments)`` emits."""
    module = ir.Module("intrinsic")
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(result, kinds), "intrinsic")
    builder = ir.IRBuilder(function.append_basic_block())
    value = emit(builder, function.args)
    if result is VOID:
        builder.ret_void()
    else:
        builder.ret(value)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, opt=3)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(target, options)
    passes.getModulePassManager().run(parsed, passes)
    return target.emit_assembly(parsed)


def assembly_of(intrinsic, params):
    names = list(inspect.signature(intrinsic._defn).parameters)[1:]
    types_of_arguments = [params if name == "params" else types.int64 for name in names]
    signature, emit = intrinsic._defn(None, *types_of_arguments)
    return assembly(
        [KINDS.get(kind, I64) for kind in signature.args],
        lambda builder, arguments: emit(Context(), builder, signature, arguments),
        KINDS.get(signature.return_type, VOID),
    )


def assembly_of_call(name, index):
    """Compile an intrinsic of int8 products, with the fields of its call as the arguments."""
    count = len(CALLS[name]._fields)
    signature, emit = getattr(int8_microkernels, name)._defn(
        None, types.literal(index), types.NamedUniTuple(types.int64, count, CALLS[name])
    )

    def emit_call(builder, arguments):
        call = ir.Constant(ir.ArrayType(I64, count), ir.Undefined)
        for i, argument in enumerate(arguments):
            call = builder.insert_value(call, argument, i)
        emit(Context(), builder, signature, [None, call])

    return assembly([I64] * count, emit_call)


def emit_lookup(builder, arguments):
    """Look up the bytes of a vector in memory."""
    code = simd_emitter.Emitter(builder)
    (address,) = arguments
    indices = code.load(address, 0, simd_emitter.I32_VECTOR)
    code.store(code.lookup_bytes(range(16), indices), address)


def facts_of_intrinsics():
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
                text = assembly_of(intrinsic, params)
                facts[name] = {
                    "fma": len(re.findall(FMA, text)),
                    "calls": sorted(set(re.findall(r"\t(?:callq?|blr?)\t(\S+)", text))),
                    "on_stack": len(re.findall(ON_STACK, text)),
                }
    text = assembly([I64], emit_lookup)
    facts["lookup_bytes"] = {
        "calls": re.findall(r"\t(?:callq?|blr?)\t(\S+)", text),
        "mnemonics": re.findall(r"^\t(\w+)", text, re.M),
    }
    return facts


def facts_of_int8_products():
    keys = [(spec.element, spec.bits, spec.group_size) for spec in int8_microkernels.FORMATS]
    facts = {}
    for bits in int8_dot.BITS:
        for name in CALLS:
            text = assembly_of_call(name, keys.index(("float16", bits, 32))).replace("{vex}", "")
            facts[f"{name}:{bits}"] = Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE))
    return facts


print(json.dumps(facts_of_int8_products() if FEATURES else facts_of_intrinsics()))
