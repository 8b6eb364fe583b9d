"""PID 1 of a slot: starts commands, serves file operations and background processes, reaps.

Standard library only, and little of it: this process is the idle cost of every slot and the path of every call.
`host.process.runner_code` joins these modules into the one file that a slot starts (docs/decisions/0006). They share one
namespace there, so that names at module level are unique over the package, modules import each other's names without
`as`, and annotations and docstrings exist for the reader alone.

It never blocks, never asks the name service (NSS would load the slot's own libraries), and never loads a file of the
slot. `posix` stands for `os`, whose own code would cost each slot's start 1.3 ms.
"""
