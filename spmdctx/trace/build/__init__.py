"""Turns a jaxpr into a Program: ops with rules, calls inlined, and loop bodies as regions between boundary ops."""
