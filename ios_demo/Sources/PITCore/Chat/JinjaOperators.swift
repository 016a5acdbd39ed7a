import Foundation

extension JinjaInterpreter {
    func arithmetic(_ sign: String, _ left: JinjaValue, _ right: JinjaValue) throws -> JinjaValue {
        if sign == "~" { return .string(left.text() + right.text()) }
        switch (sign, left, right) {
        case ("+", .string(let a), .string(let b)): return .string(a + b)
        case ("+", .list(let a), .list(let b)): return .list(a + b)
        case ("*", .string(let text), .integer(let count)), ("*", .integer(let count), .string(let text)):
            if text.utf8.count * max(0, min(count, 1 << 20)) > 1 << 16 { throw stopped("a text is repeated too often") }
            return .string(String(repeating: text, count: max(0, count)))
        default: break
        }
        guard let a = left.number, let b = right.number else {
            throw stopped("'\(sign)' stands between \(left.kind) and \(right.kind)")
        }
        if let a = left.integer, let b = right.integer, let whole = try wholeArithmetic(sign, a, b) { return .integer(whole) }
        switch sign {
        case "+": return .float(a + b)
        case "-": return .float(a - b)
        case "*": return .float(a * b)
        case "**": return .float(pow(a, b))
        case "/", "//", "%":
            if b == 0 { throw stopped("a number is divided by 0") }
            let floor = (a / b).rounded(.down)
            return .float(sign == "/" ? a / b : sign == "//" ? floor : a - floor * b)
        default: throw stopped("the sign '\(sign)' is not known")
        }
    }

    /// Whole numbers stay whole, apart from `/` and negative powers; nil for those.
    private func wholeArithmetic(_ sign: String, _ a: Int, _ b: Int) throws -> Int? {
        func checked(_ result: (partialValue: Int, overflow: Bool)) throws -> Int {
            if result.overflow { throw stopped("a number is beyond 64 bits") }
            return result.partialValue
        }
        switch sign {
        case "+": return try checked(a.addingReportingOverflow(b))
        case "-": return try checked(a.subtractingReportingOverflow(b))
        case "*": return try checked(a.multipliedReportingOverflow(by: b))
        case "//", "%":
            if b == 0 { throw stopped("a number is divided by 0") }
            let quotient = try checked(a.dividedReportingOverflow(by: b))
            let rest = a - quotient * b
            let isRounded = rest != 0 && (rest < 0) != (b < 0)
            return sign == "//" ? quotient - (isRounded ? 1 : 0) : rest + (isRounded ? b : 0)
        case "**":
            guard b >= 0 else { return nil }
            if b > 64, abs(a) > 1 { throw stopped("a number is beyond 64 bits") }
            return try (0..<min(b, 64 + b % 2)).reduce(1) { power, _ in try checked(power.multipliedReportingOverflow(by: a)) }
        default: return nil
        }
    }

    func compare(_ sign: String, _ left: JinjaValue, _ right: JinjaValue) throws -> Bool {
        switch sign {
        case "==": return left.equals(right)
        case "!=": return !left.equals(right)
        case "in": return try contains(right, left)
        case "not in": return !(try contains(right, left))
        default:
            let order = try order(left, right)
            return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0
        }
    }

    /// Below 0 where the left comes first.
    func order(_ left: JinjaValue, _ right: JinjaValue) throws -> Int {
        if let a = left.number, let b = right.number { return a < b ? -1 : a > b ? 1 : 0 }
        if case .string(let a) = left, case .string(let b) = right {
            let (first, second) = (Array(a.unicodeScalars.map(\.value)), Array(b.unicodeScalars.map(\.value)))
            return first.lexicographicallyPrecedes(second) ? -1 : first == second ? 0 : 1
        }
        throw stopped("\(left.kind) and \(right.kind) have no order")
    }

    private func contains(_ whole: JinjaValue, _ part: JinjaValue) throws -> Bool {
        switch whole {
        case .string(let text):
            guard case .string(let part) = part else { throw stopped("\(part.kind) is looked for in a text") }
            return JinjaText.find(Array(text.unicodeScalars), Array(part.unicodeScalars), 0) != nil
        case .list(let items): return items.contains { $0.equals(part) }
        case .object(let object): return object[part] != nil
        case .undefined: return false
        default: throw stopped("something is looked for in \(whole.kind)")
        }
    }

    func test(_ name: String, _ value: JinjaValue, _ arguments: [JinjaValue]) throws -> Bool {
        func argument() throws -> JinjaValue {
            guard let first = arguments.first else { throw stopped("the test '\(name)' needs an argument") }
            return first
        }
        func whole() throws -> Int {
            guard let number = value.integer else { throw stopped("\(value.kind) is no whole number") }
            return number
        }
        switch name {
        case "defined": if case .undefined = value { return false } else { return true }
        case "undefined": if case .undefined = value { return true } else { return false }
        case "none": if case .none = value { return true } else { return false }
        case "string": if case .string = value { return true } else { return false }
        case "mapping": if case .object = value { return true } else { return false }
        case "boolean": if case .bool = value { return true } else { return false }
        case "true": if case .bool(true) = value { return true } else { return false }
        case "false": if case .bool(false) = value { return true } else { return false }
        case "integer": if case .integer = value { return true } else { return false }
        case "float": if case .float = value { return true } else { return false }
        case "number": return value.number != nil
        case "iterable", "sequence":
            switch value {
            case .list, .string, .object, .undefined: return true
            default: return false
            }
        case "callable":
            switch value {
            case .macro, .function, .method: return true
            default: return false
            }
        case "eq", "equalto", "sameas": return value.equals(try argument())
        case "ne": return !value.equals(try argument())
        case "lt", "lessthan": return try compare("<", value, try argument())
        case "le": return try compare("<=", value, try argument())
        case "gt", "greaterthan": return try compare(">", value, try argument())
        case "ge": return try compare(">=", value, try argument())
        case "in": return try compare("in", value, try argument())
        case "odd": return try whole() % 2 != 0
        case "even": return try whole() % 2 == 0
        case "divisibleby":
            guard let divisor = try argument().integer, divisor != 0 else { throw stopped("divisibleby needs a number") }
            return try whole() % divisor == 0
        default: throw stopped("the test '\(name)' is not known")
        }
    }

    /// A date as C's `strftime` writes it in the locale C.
    func formatted(_ date: Date, _ format: String) throws -> String {
        let calendar = Calendar(identifier: .gregorian)
        let parts = calendar.dateComponents([.year, .month, .day, .hour, .minute, .second, .weekday], from: date)
        let months = [
            "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
            "December",
        ]
        let days = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
        let month = months[((parts.month ?? 1) - 1) % 12]
        let day = days[((parts.weekday ?? 1) - 1) % 7]
        func padded(_ number: Int?, _ width: Int = 2) -> String {
            let digits = String(number ?? 0)
            return String(repeating: "0", count: max(0, width - digits.count)) + digits
        }
        var result = ""
        var scalars = format.unicodeScalars[...]
        while let scalar = scalars.popFirst() {
            guard scalar == "%" else {
                result.unicodeScalars.append(scalar)
                continue
            }
            switch scalars.popFirst() {
            case "Y": result += padded(parts.year, 4)
            case "y": result += padded((parts.year ?? 0) % 100)
            case "m": result += padded(parts.month)
            case "d": result += padded(parts.day)
            case "H": result += padded(parts.hour)
            case "M": result += padded(parts.minute)
            case "S": result += padded(parts.second)
            case "B": result += month
            case "b": result += month.prefix(3)
            case "A": result += day
            case "a": result += day.prefix(3)
            case "%": result += "%"
            default: throw stopped("a date is asked for in the form \(shown(format)), which is not known")
            }
        }
        return result
    }
}
