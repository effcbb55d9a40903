"""The one seam to record files, logs, spans and metrics. Everything here is a view of records."""
