"""The parity matrix: checkpoints, layouts, precisions and runtimes in one table (docs/parity.md).

`run` is the order of the work, `artifacts` makes what is checked, `checks` says what a cell is, `table` is the
result, `page` draws it.
"""
