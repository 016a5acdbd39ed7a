package org.pytorch.executorch;

/** Signatures for a compiler; see the README of this folder. */
public class EValue {
    private final Object value;

    private EValue(Object value) {
        this.value = value;
    }

    public static EValue from(Tensor value) {
        return new EValue(value);
    }

    public static EValue from(long value) {
        return new EValue(value);
    }

    public Tensor toTensor() {
        return (Tensor) value;
    }

    public long toInt() {
        return (Long) value;
    }
}
