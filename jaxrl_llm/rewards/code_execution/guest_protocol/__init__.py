"""Code that runs inside the two sandboxes of a program and its tests.

answer_side runs the program, tests_side its tests. They exchange calls and plain values over two pipes (peer, wire).
Only this package is mounted there: its modules import the standard library and each other, nothing else.
"""
