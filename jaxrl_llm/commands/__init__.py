"""The modes of the command line: a module for each with its flags. Importing the flags does not import jax."""
