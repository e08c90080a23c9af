"""Code that runs inside the two sandboxes of a program and its tests.

program_peer runs the program, tests_runner its tests through tests_peer. Both sides exchange requests and plain values
over two pipes (peer, wire). Only this package is mounted there: its modules import the standard library and each other.
"""
