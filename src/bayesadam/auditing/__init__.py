"""Auditing data: which labels the network does not believe, and which examples it leans on."""

from bayesadam.auditing.examine import audit
from bayesadam.auditing.table import Audit, Column, Suspect

__all__ = ["Audit", "Column", "Suspect", "audit"]
