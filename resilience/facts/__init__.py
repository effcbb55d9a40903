"""What is known?  Events, records, interruptions and identities, and how they become text and bytes. Data only."""
