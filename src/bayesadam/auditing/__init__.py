"""Auditing data: which labels the network does not believe, and which examples it leans on."""

from bayesadam.auditing.examine import Audit, Column, Suspect, audit

__all__ = ["Audit", "Column", "Suspect", "audit"]
