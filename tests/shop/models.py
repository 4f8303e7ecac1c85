"""What the shop's tools change: effects that live in the same database as the journal."""

from django.db import models


class Order(models.Model):
    number = models.CharField(max_length=20, unique=True)
    customer = models.CharField(max_length=100)
    total_cents = models.PositiveIntegerField()
    refunded_cents = models.PositiveIntegerField(default=0)
    note = models.TextField(blank=True)

    def __str__(self) -> str:
        return self.number
