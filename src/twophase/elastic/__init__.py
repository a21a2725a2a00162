"""torchft behind `Communicator`: the only room that knows its private names."""
