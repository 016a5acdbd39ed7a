/// A binary heap: `first` is the element that goes before all others.
struct Heap<Element> {
    private var items: [Element] = []
    private let isBefore: (Element, Element) -> Bool

    init(by isBefore: @escaping (Element, Element) -> Bool) { self.isBefore = isBefore }

    var count: Int { items.count }
    var first: Element? { items.first }

    mutating func push(_ item: Element) {
        items.append(item)
        var child = items.count - 1
        while child > 0 {
            let parent = (child - 1) / 2
            guard isBefore(items[child], items[parent]) else { return }
            items.swapAt(child, parent)
            child = parent
        }
    }

    mutating func pop() -> Element? {
        guard let top = items.first, let last = items.popLast() else { return nil }
        guard !items.isEmpty else { return top }
        items[0] = last
        var parent = 0
        while true {
            var best = parent
            for child in [2 * parent + 1, 2 * parent + 2] where child < items.count && isBefore(items[child], items[best]) {
                best = child
            }
            guard best != parent else { return top }
            items.swapAt(parent, best)
            parent = best
        }
    }
}
