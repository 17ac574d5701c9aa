"""The one place that names the version of the package and of the SQL engine it carries."""

__version__ = "0.1.0"
