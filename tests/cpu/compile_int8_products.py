"""Compile the products of int8 activations for another CPU, in a process of its own.

    python compile_int8_products.py REGISTERS TRIPLE CPU FEATURES

Prints JSON: for each intrinsic and number of bits, the number of each instruction in its assembly.
Nothing is run, and numba compiles nothing.
"""

import json
import re
import sys
from collections import Counter

from llvmlite import binding, ir
from numba import types

from labkit.cpu.simd import register_tile_sizes

REGISTERS, TRIPLE, CPU, FEATURES = sys.argv[1:]
register_tile_sizes.HOST_REGISTERS = getattr(register_tile_sizes, REGISTERS)

from labkit.cpu.matmul import int8_dot  # noqa: E402

int8_dot.host_form = lambda bits: int8_dot.form_of(bits, TRIPLE, CPU, FEATURES)

from labkit.cpu.matmul import int8_microkernels  # noqa: E402

CALLS = {
    "quantize_row": int8_microkernels.QuantizeCall,
    "multiply_row": int8_microkernels.RowCall,
    "unpack_panel": int8_microkernels.UnpackCall,
    "multiply_tile": int8_microkernels.Int8TileCall,
}


class Context:
    def get_dummy_value(self):
        return ir.Constant(ir.IntType(8).as_pointer(), None)


def lower(name, index):
    """Return a module with the intrinsic as a function of its call's fields."""
    count = len(CALLS[name]._fields)
    signature, emit = getattr(int8_microkernels, name)._defn(
        None, types.literal(index), types.NamedUniTuple(types.int64, count, CALLS[name])
    )
    module = ir.Module("intrinsic")
    module.triple = TRIPLE
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
    function = ir.Function(module, kind, "intrinsic")
    builder = ir.IRBuilder(function.append_basic_block())
    call = ir.Constant(ir.ArrayType(ir.IntType(64), count), ir.Undefined)
    for i, argument in enumerate(function.args):
        call = builder.insert_value(call, argument, i)
    emit(Context(), builder, signature, [None, call])
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
    keys = [(spec.element, spec.bits, spec.group_size) for spec in int8_microkernels.FORMATS]
    facts = {}
    for bits in int8_dot.BITS:
        index = keys.index(("float16", bits, 32))
        for name in CALLS:
            text = assembly(lower(name, index)).replace("{vex}", "")
            facts[f"{name}:{bits}"] = Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE))
    print(json.dumps(facts))


main()
