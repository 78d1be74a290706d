"""The decode kernel and the tiled kernel of paged attention, twins of those for Metal.

In: a struct of pointers (:mod:`.attention_params`) and a grid. Out: the attention's output, the
counters and the stamp of the launch (:mod:`.kernel_entry_points`).
"""
