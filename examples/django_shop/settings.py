"""Settings. One variable names the database, for Django and for Postbus."""

import os

from psycopg.conninfo import conninfo_to_dict

_parts = conninfo_to_dict(os.environ["POSTBUS_DSN"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _parts["dbname"],
        **{name.upper(): _parts.get(name, "") for name in ("host", "port", "user", "password")},
    }
}
INSTALLED_APPS = ["examples.django_shop"]
ROOT_URLCONF = "examples.django_shop.views"
SECRET_KEY = os.environ.get("SECRET_KEY", "only for the example")
USE_TZ = True
