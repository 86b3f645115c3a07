"""The processes of the mesh, one package each. They meet only in `shared`."""
