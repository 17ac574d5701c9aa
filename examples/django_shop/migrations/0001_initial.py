"""The table, the engine, a queue and a stream: `migrate` makes all of it, also in test databases."""

from typing import Any

from django.db import migrations, models

from postbus import engine


def install(apps: Any, schema_editor: Any) -> None:
    engine.install(schema_editor.connection.connection)  # a connection of psycopg


class Migration(migrations.Migration):
    operations = (
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("email", models.EmailField(max_length=254)),
                ("item", models.TextField()),
                ("confirmed", models.BooleanField(default=False)),
                ("parcels", models.IntegerField(default=0)),
            ],
        ),
        migrations.RunPython(install, migrations.RunPython.noop),
        migrations.RunSQL("select postbus.create_queue('confirmations')", migrations.RunSQL.noop),
        migrations.RunSQL("select postbus.create_stream('orders')", migrations.RunSQL.noop),
    )
