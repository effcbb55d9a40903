"""The only code that writes record files, logs, spans and metrics. Everything here is a view of records."""
