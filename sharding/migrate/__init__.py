"""Moving the rows of one layer's experts between ranks, checked, while the layer is in use."""

from widemesh.sharding.migrate.checksum import row_checksums
from widemesh.sharding.migrate.programs import MigrationPrograms, Staging
from widemesh.sharding.migrate.words import from_words, to_words

__all__ = ["MigrationPrograms", "Staging", "from_words", "row_checksums", "to_words"]
