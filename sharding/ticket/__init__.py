"""The step ticket: what ranks agree on before each step, waves and pauses, and who is alive. Imports no jax."""

from widemesh.sharding.ticket.base import Pending, Ticket, Values
from widemesh.sharding.ticket.errors import TicketError, TicketLeft, TicketLost, TicketMismatch, TicketTimeout
from widemesh.sharding.ticket.lifeline import Lifeline
from widemesh.sharding.ticket.local import LocalTicket
from widemesh.sharding.ticket.net import NetTicket
from widemesh.sharding.ticket.schema import Field, Merge, Merged, TicketSchema
from widemesh.sharding.ticket.waves import WAVE_FIELDS, WaveControl

__all__ = [
    "WAVE_FIELDS", "Field", "Lifeline", "LocalTicket", "Merge", "Merged", "NetTicket", "Pending", "Ticket",
    "TicketError", "TicketLeft", "TicketLost", "TicketMismatch", "TicketSchema", "TicketTimeout", "Values",
    "WaveControl",
]  # fmt: skip
