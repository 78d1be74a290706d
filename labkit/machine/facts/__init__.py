"""Facts of the machine: hardware, memory, conditions during a run, the code's revision.

In: files of the operating system and its tools. Out: values for records; a fact that cannot be read
is left out.
"""
