package org.pytorch.executorch;

import java.util.function.Function;

/** Signatures for a compiler, and a seam for tests; see the README of this folder. */
public abstract class Module {
    public static final int LOAD_MODE_MMAP = 1;

    /** What `load` gives. The real class has nothing of the kind. */
    public static Function<String, Module> opener;

    public static Module load(String path, int loadMode, int threads) {
        return opener.apply(path);
    }

    public abstract EValue[] execute(String method, EValue... inputs);

    public abstract void destroy();
}
