"""What a run is. Imports nothing of leaven but itself."""
