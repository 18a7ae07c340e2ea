def need(): pass
