"""The shop's own tables, with which the support agent works."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.text import Truncator

from project.helpdesk.money import euros


class Customer(models.Model):
    name = models.CharField(max_length=100)
    email = models.EmailField(unique=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    class Status(models.TextChoices):
        PAID = "paid"
        SHIPPED = "shipped"
        DELIVERED = "delivered"
        RETURNED = "returned"

    number = models.CharField(max_length=20, unique=True)
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="orders")
    item = models.CharField(max_length=200)
    total_cents = models.PositiveIntegerField()
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.PAID)
    placed_on = models.DateField()
    delivered_on = models.DateField(null=True, blank=True)
    tracking = models.CharField(max_length=100, blank=True)

    class Meta:
        ordering = ["number"]
        constraints = [
            models.CheckConstraint(condition=Q(total_cents__gt=0), name="order_costs_something"),
            models.CheckConstraint(
                condition=Q(delivered_on__isnull=True) | Q(delivered_on__gte=F("placed_on")),
                name="order_delivered_after_it_was_placed",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.number}: {self.item} ({euros(self.total_cents)})"


class Ticket(models.Model):
    class Status(models.TextChoices):
        OPEN = "open"
        SOLVED = "solved"

    number = models.PositiveIntegerField(unique=True)
    customer = models.ForeignKey(Customer, on_delete=models.PROTECT, related_name="tickets")
    subject = models.CharField(max_length=200)
    body = models.TextField()
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.OPEN)

    class Meta:
        ordering = ["number"]
        constraints = [
            models.CheckConstraint(condition=Q(status__in=["open", "solved"]), name="ticket_status_is_known"),
        ]

    def __str__(self) -> str:
        return f"Ticket {self.number}: {self.subject}"

    @property
    def session_key(self) -> str:
        """The key of the session with the agent's runs on this ticket."""
        return f"ticket-{self.number}"

    @property
    def idempotency_key(self) -> str:
        """The key with which the ticket is one run, however often it is started."""
        return f"helpdesk-ticket-{self.number}"

    def as_task(self) -> str:
        """Format the ticket as the agent's task; the text must never change, or it would be another task."""
        sender = f"{self.customer.name} <{self.customer.email}>"
        return f"{self.subject} (ticket {self.number})\nFrom: {sender}\n\n{self.body}"

    def files(self, kind: Literal["photos", "mails"]) -> list[Path]:
        """List the files of one kind that the customer sent with the ticket."""
        return sorted((settings.BASE_DIR / "fixtures" / kind).glob(f"ticket-{self.number}.*"))


class Note(models.Model):
    ticket = models.ForeignKey(Ticket, on_delete=models.CASCADE, related_name="notes")
    text = models.TextField()
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["created_at", "pk"]
        constraints = [models.CheckConstraint(condition=~Q(text=""), name="note_says_something")]

    def __str__(self) -> str:
        return Truncator(self.text).chars(60)


class Article(models.Model):
    """A page of the knowledge base."""

    slug = models.SlugField(unique=True)
    title = models.CharField(max_length=200)
    body = models.TextField()

    class Meta:
        ordering = ["title"]

    def __str__(self) -> str:
        return self.title
