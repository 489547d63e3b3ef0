"""Typed errors of the goldens: one per way in which an operator can be handed something it is not defined for, and
one for results that a judge rejects."""

from __future__ import annotations

from v41_config.errors import V41Error


class GoldenError(V41Error):
    """Base of the errors below; `where` names what is wrong, usually an operator and its operand."""


class OperandError(GoldenError):
    """An operand has a shape or dtype that the operator is not defined for."""


class PositionError(GoldenError):
    """A position lies outside the RoPE table, or an active count outside its rows."""


class WeightError(GoldenError):
    """A weight tensor is missing, or has a dtype or shape that its operator cannot use."""


class ExpertError(GoldenError):
    """A row is routed to an expert whose weights are not here."""


class JudgementError(GoldenError, AssertionError):
    """A judge rejects a result: `where` is its name, `found` the verdict with its statistics, `expected` the rule.

    Also an `AssertionError`, so that a test runner counts a failed test and not a broken one.
    """


class TreeError(GoldenError):
    """A saved tree cannot be used; `where` is the file, or the field of its manifest."""
