"""Work on whole tables: compaction, replay, deletion."""
