"""The shop in the admin, read-only, for people who look things up while they decide about a run."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from project.helpdesk.models import Article, Customer, Note, Order, Ticket
from project.helpdesk.money import euros


class ReadOnly:
    """Admin permissions that allow no changes."""

    def has_add_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        return False


class NoteInline(ReadOnly, admin.TabularInline):
    model = Note
    fields = ["created_at", "text"]
    readonly_fields = fields


@admin.register(Ticket)
class TicketAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["number", "subject", "customer", "status"]
    list_filter = ["status"]
    list_select_related = ["customer"]
    search_fields = ["number", "subject", "body", "customer__name"]
    inlines = [NoteInline]


@admin.register(Order)
class OrderAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["number", "item", "customer", "total", "status", "placed_on"]
    list_filter = ["status"]
    list_select_related = ["customer"]
    search_fields = ["number", "item", "customer__name"]

    @admin.display(ordering="total_cents")
    def total(self, order: Order) -> str:
        return euros(order.total_cents)


@admin.register(Customer)
class CustomerAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["name", "email"]
    search_fields = ["name", "email"]


@admin.register(Article)
class ArticleAdmin(ReadOnly, admin.ModelAdmin):
    list_display = ["title", "slug"]
    search_fields = ["title", "body"]
